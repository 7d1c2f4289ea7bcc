"""Group, layer, instance and RMS normalization of PyTorch, flax, equinox, Haiku, Keras and ONNX: values, gradients, and
round trips."""

from __future__ import annotations

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from converted_gru import assert_same_bits, assert_trees_close, normal, random_like
from converted_layers import check_record, images, loss
from flax import nnx

import jaxgrad
import jaxgrad.convert.equinox
import jaxgrad.convert.flax
import jaxgrad.convert.haiku
import jaxgrad.convert.keras
import jaxgrad.convert.torch
from jaxgrad.convert import NormWeights

pytestmark = pytest.mark.jax_version

C = 8
X, NCHW = 1 + images(5, 4), 1 + images(5, 4, channels_last=False)
WIDE = {"param_dtype": jnp.float64}


@pytest.mark.parametrize(
    ("name", "arguments", "settings"),
    [
        ("GroupNorm", (4, C), {"kind": "group", "num_groups": 4, "eps": 1e-3}),
        ("LayerNorm", ((C, 5, 4),), {"kind": "layer"}),
        ("LayerNorm", (4,), {"kind": "layer", "bias": False}),
        ("InstanceNorm2d", (C,), {"kind": "instance", "affine": True}),
        ("RMSNorm", (4,), {"kind": "rms"}),
    ],
)
def test_torch(torch, name, arguments, settings):
    convert = jaxgrad.convert.torch
    own = {key: value for key, value in settings.items() if key in ("eps", "bias", "affine")}
    layer = getattr(torch.nn, name)(*arguments, **own, dtype=torch.float64)
    with torch.no_grad():
        for i, parameter in enumerate(layer.parameters()):
            parameter.copy_(torch.from_numpy(1 + normal(*parameter.shape, seed=i)))
    settings = {key: value for key, value in settings.items() if key in ("eps", "kind", "num_groups")}
    record = convert.read_norm({f"n.{k}": v for k, v in layer.state_dict().items()}, "n.", **settings)
    assert_same_bits(convert.write_norm(record), {k: v.numpy() for k, v in layer.state_dict().items()})
    x = torch.from_numpy(NCHW).requires_grad_()
    y = layer(x)
    (y * torch.cos(torch.arange(y.numel(), dtype=y.dtype)).reshape(y.shape)).sum().backward()
    gradients = jax.grad(lambda record, x: loss(record(x)), (0, 1))(record, jnp.asarray(NCHW))
    expected = (y, {key: p.grad for key, p in layer.named_parameters()}, x.grad)
    found = (record(NCHW), convert.write_norm(gradients[0]), gradients[1])
    assert_trees_close(found, jax.tree.map(lambda a: jnp.asarray(a.detach().numpy()), expected), 1e-10)


FLAX = [
    ("GroupNorm", {"num_groups": 4}),
    ("GroupNorm", {"num_groups": None, "group_size": 4, "use_scale": False}),
    ("LayerNorm", {"epsilon": 1e-3, "use_bias": False}),
    ("InstanceNorm", {"feature_axes": 1}),
    ("RMSNorm", {}),
]


@pytest.mark.parametrize(
    ("name", "settings"),
    [*FLAX, ("LayerNorm", {"reduction_axes": (-1, -2), "feature_axes": (-2, -1)})],
)
def test_linen(name, settings):
    convert = jaxgrad.convert.flax
    layer, x = getattr(nn, name)(**settings, **WIDE), NCHW if "feature_axes" in settings else X
    params = random_like(layer.init(jax.random.key(0), x))["params"]
    record = convert.read_norm({"params": params}, layer)
    check_record(record, convert.write_norm, params, lambda params, x: layer.apply({"params": params}, x), x)


@pytest.mark.parametrize(("name", "settings"), FLAX)
def test_nnx(name, settings):
    convert = jaxgrad.convert.flax
    layer = getattr(nnx, name)(C, **settings, **WIDE, rngs=nnx.Rngs(0))
    nnx.update(layer, random_like(nnx.to_pure_dict(nnx.state(layer))))
    x = NCHW if "feature_axes" in settings else X
    record = convert.read_norm(layer)
    assert_same_bits(convert.write_norm(record), nnx.to_pure_dict(nnx.state(layer)))
    assert_trees_close(record(x), layer(jnp.asarray(x)))


def test_flax_errors():
    convert, params = jaxgrad.convert.flax, {"scale": np.ones(C)}
    for layer, message in (
        (nn.GroupNorm(reduction_axes=(1, 2, 3)), r"layer must have reduction_axes=None, got \(1, 2, 3\)"),
        (nn.LayerNorm(reduction_axes=(1, 2)), r"layer must have feature_axes=\(1, 2\), got -1"),
        (nn.InstanceNorm(feature_axes=(2, 3)), r"layer must have one axis of channels, got feature_axes=\(2, 3\)"),
        (nn.GroupNorm(3), r"the number of groups must divide the sizes \[\(8,\)\], got 3"),
        (None, "layer must be a normalization of flax.linen or flax.nnx"),
    ):
        with pytest.raises(ValueError, match=f"^jaxgrad.convert.flax.read_norm: {message}"):
            convert.read_norm(params, layer)
    with pytest.raises(TypeError, match=r"layer must be a group, layer, .* of flax, got BatchNorm"):
        convert.read_norm(params, nn.BatchNorm())


@pytest.mark.parametrize(
    ("name", "arguments", "x"),
    [
        ("GroupNorm", {"groups": 4, "channels": C}, NCHW),
        ("LayerNorm", {"shape": (C, 5, 4), "eps": 1e-3}, NCHW),
        ("LayerNorm", {"shape": C, "use_bias": False}, X[:, 0, 0]),
        ("RMSNorm", {"shape": C, "use_weight": False}, X[:, 0, 0]),
    ],
)
def test_equinox(name, arguments, x):
    convert = jaxgrad.convert.equinox
    layer = random_like(getattr(eqx.nn, name)(**arguments))
    record = convert.read_norm(layer)
    check_record(record, lambda record: convert.write_norm(record, layer), layer, lambda n, x: jax.vmap(n)(x), x)


def test_equinox_errors():
    convert, layer = jaxgrad.convert.equinox, eqx.nn.GroupNorm(4, C)
    record = NormWeights(jnp.ones(C), None, kind="instance", epsilon=1e-5, axis=1)
    written = convert.write_norm(record, eqx.nn.GroupNorm(C, C))
    assert_same_bits((written.weight, written.bias), (jnp.ones(C), jnp.zeros(C)))
    for weights, message in (
        (record, "layer must have groups=8 of the weights, got 4"),
        (NormWeights(None, None, kind="layer", epsilon=1e-5), "layer must have kind=layer of the weights, got group"),
        (
            NormWeights(jnp.ones(4), None, kind="group", epsilon=1e-5, num_groups=4),
            r"layer must have a weight of the shape \(4,\), as the weights, got \(8,\)",
        ),
    ):
        with pytest.raises(ValueError, match=f"^jaxgrad.convert.equinox.write_norm: {message}"):
            convert.write_norm(weights, layer)
    with pytest.raises(TypeError, match="weights must be NormWeights, got int"):
        convert.write_norm(3, layer)


SCALED = {"create_scale": True, "create_offset": True}
FIRST = {"data_format": "channels_first"}


@pytest.mark.parametrize(
    ("name", "x", "settings", "own"),
    [
        ("GroupNorm", X, {"kind": "group", "groups": 4, "eps": 1e-3}, {}),
        ("GroupNorm", NCHW, {"kind": "group", "groups": 2, **FIRST}, {}),
        ("LayerNorm", X, {"kind": "layer", "axis": -1}, SCALED),
        ("LayerNorm", X, {"kind": "layer", "axis": slice(2, None)}, {**SCALED, "param_axis": (2, 3)}),
        ("InstanceNorm", X, {"kind": "instance"}, SCALED),
        ("InstanceNorm", NCHW, {"kind": "instance", **FIRST}, SCALED),
        ("RMSNorm", X, {"kind": "rms", "axis": 1}, {"param_axis": 1}),
    ],
)
def test_haiku(name, x, settings, own):
    convert = jaxgrad.convert.haiku
    arguments = {**own, **{key: value for key, value in settings.items() if key != "kind"}}
    module = hk.without_apply_rng(hk.transform(lambda x: getattr(hk, name)(**arguments, name="norm")(x)))
    params = random_like(module.init(jax.random.key(0), x))["norm"]
    record = convert.read_norm(params, **settings)
    check_record(record, convert.write_norm, params, lambda params, x: module.apply({"norm": params}, x), x)


def test_haiku_errors():
    convert = jaxgrad.convert.haiku
    for settings, message in (
        ({"kind": "batch"}, "kind must be"),
        ({"kind": "group", "groups": 3}, r"the number of groups must divide the sizes \[\(8,\)\], got 3"),
        ({"kind": "instance", "groups": 2}, 'the number of groups must be None for kind "instance", got 2'),
        ({"kind": "layer", "axis": (1, 2)}, r"scale and bias must have rank 2, got the shape \(8,\)"),
        ({"kind": "layer", "eps": -1.0}, "eps must be a finite number of at least 0, got -1.0"),
    ):
        with pytest.raises(ValueError, match=f"^jaxgrad.convert.haiku.read_norm: {message}"):
            convert.read_norm({"scale": np.ones(C)}, **settings)
    with pytest.raises(ValueError, match=r"the parameters must have the axes \(-1,\), got the shape \(1, 8, 1, 1\)"):
        convert.read_norm({"scale": np.ones((1, C, 1, 1))}, kind="layer")
    with pytest.raises(TypeError, match="params must be a mapping, got int"):
        convert.read_norm(3, kind="layer")
    with pytest.raises(TypeError, match="the number of groups must be an int, got NoneType"):
        convert.read_norm({"scale": np.ones(C)}, kind="group")


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("GroupNormalization", {"groups": 4, "center": False}),
        ("LayerNormalization", {"axis": [2, 3], "epsilon": 0.1}),
        ("RMSNormalization", {}),
    ],
)
def test_keras(name, arguments):
    keras, convert = pytest.importorskip("keras"), jaxgrad.convert.keras
    if not hasattr(keras.layers, name):
        pytest.skip(f"this Keras has no {name}")
    layer = getattr(keras.layers, name)(**arguments)
    with pytest.raises(ValueError, match=f"read_norm: layer must be built, got {name} without"):
        convert.read_norm(layer)
    layer.build(X.shape)
    weights = [v.value for v in layer.trainable_variables]
    check = lambda weights, x: layer.stateless_call(weights, [], x)[0]  # noqa: E731
    record = convert.read_norm(layer)
    assert_same_bits(convert.write_norm(record), [np.asarray(w) for w in weights])
    weights = random_like(weights)
    layer.set_weights(weights)
    x = X.astype("f4")
    assert_trees_close(convert.read_norm(layer)(x), check(weights, x), 1e-5)


OF_ONNX = {
    "GroupNormalization": ({"num_groups": 4, "epsilon": 1e-3}, (C,), 21),
    "GroupNormalization, opset 18": ({"num_groups": 4}, (4,), 18),
    "LayerNormalization": ({"axis": -2}, (5, 4), 17),
    "InstanceNormalization": ({}, (C,), 17),
    "RMSNormalization": ({"axis": 3}, (4,), 23),
}


def _onnx(name):
    onnx = pytest.importorskip("onnx")
    attributes, shape, opset = OF_ONNX[name]
    op_type, helper = name.partition(",")[0], onnx.helper
    names = ("scale",) if op_type == "RMSNormalization" else ("scale", "bias")
    tensors = [onnx.numpy_helper.from_array(normal(*shape, seed=i).astype("f4"), n) for i, n in enumerate(names)]
    x, y = (helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None) for name in "xy")
    node = helper.make_node(op_type, ["x", *names], ["y"], "own", **attributes)
    graph = helper.make_graph([node], "g", [x], [y], tensors)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)])


@pytest.mark.parametrize("name", OF_ONNX)
def test_onnx(name):
    model = _onnx(name)
    from onnx.reference import ReferenceEvaluator

    import jaxgrad.convert.onnx as convert

    (record,) = convert.read_norm(model)
    x = NCHW.astype("f4")
    expected = ReferenceEvaluator(model).run(None, {"x": x})[0]
    np.testing.assert_allclose(record(x), expected, rtol=0, atol=1e-5)
    assert convert.write_norm(record, model, "own") == model
    gradient = jax.grad(lambda record: loss(record(x)))(record)
    (found,) = convert.read_norm(convert.write_norm(gradient, model))
    assert_same_bits(jax.tree.leaves(found), jax.tree.leaves(gradient))


def test_onnx_errors():
    model = _onnx("LayerNormalization")
    import jaxgrad.convert.onnx as convert

    (record,) = convert.read_norm(model)
    with pytest.raises(ValueError, match="the node 'own' must have kind='layer', got 'rms'"):
        convert.write_norm(NormWeights(record.scale, None, kind="rms", epsilon=1e-5), model)
    model.graph.node[0].attribute[0].i = -1
    with pytest.raises(ValueError, match=r"the node 'own' must have axis -2, as scale has the shape \(5, 4\), got -1"):
        convert.read_norm(model)
    model.graph.node[0].attribute[0].i = 1
    for size in (2, 3, 5, 4):  # of x
        model.graph.input[0].type.tensor_type.shape.dim.add().dim_value = size
    with pytest.raises(ValueError, match=r"the node 'own' must have axis -2, as scale has the shape \(5, 4\), got 1"):
        convert.read_norm(model)
    model.graph.node[0].op_type = "BatchNormalization"
    with pytest.raises(ValueError, match="the graph has no GroupNormalization or LayerNormalization or"):
        convert.read_norm(model)


def test_from_one_format_to_others():
    """One group normalization, from PyTorch to flax, Haiku and equinox."""
    state_dict = {"weight": 1 + normal(C), "bias": normal(C, seed=1)}
    record = jaxgrad.convert.torch.read_norm(state_dict, kind="group", num_groups=2)
    expected = record(NCHW)
    params = jaxgrad.convert.flax.write_norm(record)
    of_flax = nn.GroupNorm(2, epsilon=1e-5).apply({"params": params}, jnp.moveaxis(NCHW, 1, -1))
    module = hk.without_apply_rng(hk.transform(lambda x: hk.GroupNorm(2, **FIRST)(x)))
    of_haiku = module.apply({"group_norm": jaxgrad.convert.haiku.write_norm(record)}, NCHW)
    layer = jaxgrad.convert.equinox.write_norm(record, eqx.nn.GroupNorm(2, C))
    for found in (jnp.moveaxis(of_flax, -1, 1), of_haiku, jax.vmap(layer)(jnp.asarray(NCHW))):
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6)
    with pytest.raises(ValueError, match=r"read_norm: the layer must have track_running_stats=False, got running_mean"):
        jaxgrad.convert.torch.read_norm({**state_dict, "running_mean": np.ones(C)}, kind="instance")
    with pytest.raises(ValueError, match=r"read_norm: state_dict has no n\.weight; prefixes with 'weight' in it"):
        jaxgrad.convert.torch.read_norm(state_dict, "n.", kind="layer")
