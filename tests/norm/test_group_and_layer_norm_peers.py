"""`group_norm`, `layer_norm` and `rms_norm` compute what flax, equinox, ONNX and PyTorch compute."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from op_cases import values_and_gradients

import jaxgrad

X = np.random.default_rng(0).normal(0.5, 2, (3, 4, 5, 6))
SCALE, BIAS = np.linspace(0.5, 2, 6), np.linspace(-1, 1, 6)
_FLAX = 1e-6


def _close(found, expected):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-8, atol=1e-8), found, expected)


def _gradients(function, *arrays):
    return jax.jit(lambda *a: values_and_gradients(function, *a))(*arrays)


def test_flax():
    nnx = pytest.importorskip("flax.nnx")
    settings = {"param_dtype": jnp.float64, "rngs": nnx.Rngs(0), "use_fast_variance": False}
    layers = {
        "group_norm": (nnx.GroupNorm(6, num_groups=3, **settings), {"num_groups": 3}),
        "layer_norm": (nnx.LayerNorm(6, **settings), {}),
        "rms_norm": (nnx.RMSNorm(6, **settings), {}),
    }
    for name, (layer, arguments) in layers.items():
        bias = () if name == "rms_norm" else (BIAS,)

        def of_flax(x, scale, *bias, layer=layer):
            graph, state = nnx.split(layer)
            state["scale"] = nnx.Param(scale)
            if bias:
                state["bias"] = nnx.Param(bias[0])
            return nnx.merge(graph, state)(x)

        def ours(x, scale, bias=None, name=name, arguments=arguments):
            return getattr(jaxgrad, name)(x, scale, bias, epsilon=_FLAX, **arguments)

        _close(_gradients(ours, X, SCALE, *bias), _gradients(of_flax, X, SCALE, *bias))


def test_equinox():
    """The layers of equinox take one example, with the channels first."""
    eqx = pytest.importorskip("equinox")
    x, c = X[:, :, 0].swapaxes(1, 2), jnp.asarray
    group = eqx.nn.GroupNorm(3, 6, dtype=jnp.float64)
    group = eqx.tree_at(lambda g: (g.weight, g.bias), group, (c(SCALE), c(BIAS)))
    _close(jaxgrad.group_norm(x, SCALE, BIAS, num_groups=3, feature_axis=1), jax.vmap(group)(x))
    layer = eqx.tree_at(lambda g: (g.weight, g.bias), eqx.nn.LayerNorm(6, dtype=jnp.float64), (c(SCALE), c(BIAS)))
    mapped = jax.vmap(jax.vmap(lambda row: jaxgrad.layer_norm(row, SCALE, BIAS)))
    _close(mapped(X[0]), jax.vmap(jax.vmap(layer))(X[0]))
    rms = eqx.nn.RMSNorm(6, dtype=jnp.float64)
    _close(jaxgrad.rms_norm(X, None, epsilon=rms.eps), jax.vmap(jax.vmap(jax.vmap(rms)))(X))


def _onnx(op, version, *arrays, **attributes):
    onnx = pytest.importorskip("onnx")
    from onnx.reference import ReferenceEvaluator

    names, helper = [f"a{i}" for i in range(len(arrays))], onnx.helper
    value = lambda name, shape: helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, shape)  # noqa: E731
    graph = helper.make_graph(
        [helper.make_node(op, names, ["y"], **attributes)],
        "graph",
        [value(name, array.shape) for name, array in zip(names, arrays, strict=True)],
        [value("y", arrays[0].shape)],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", version)])
    given = {name: array.astype(np.float32) for name, array in zip(names, arrays, strict=True)}
    return ReferenceEvaluator(model).run(None, given)[0]


def test_onnx():
    x = np.moveaxis(X, -1, 1)

    def close(found, expected):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)

    close(
        jaxgrad.group_norm(x, SCALE, BIAS, num_groups=3, feature_axis=1),
        _onnx("GroupNormalization", 21, x, SCALE, BIAS, num_groups=3),
    )
    close(
        jaxgrad.group_norm(x, SCALE, BIAS, num_groups=6, feature_axis=1),
        _onnx("InstanceNormalization", 17, x, SCALE, BIAS),
    )
    scale, bias = np.multiply.outer(np.arange(1, 6), SCALE), np.add.outer(np.arange(5), BIAS)
    close(jaxgrad.layer_norm(X, scale, bias, axis=(2, 3)), _onnx("LayerNormalization", 17, X, scale, bias, axis=2))
    close(jaxgrad.rms_norm(X, SCALE, epsilon=1e-5), _onnx("RMSNormalization", 23, X, SCALE, axis=-1))


@pytest.mark.parametrize("name", ["group_norm", "layer_norm", "rms_norm"])
def test_torch(torch, name):
    x, of_torch = np.moveaxis(X, -1, 1) if name == "group_norm" else X, torch.nn.functional
    arrays = [torch.tensor(a, requires_grad=True) for a in (x, SCALE, BIAS)]
    if name == "group_norm":
        y = of_torch.group_norm(arrays[0], 3, *arrays[1:])
        ours = lambda x, s, b: jaxgrad.group_norm(x, s, b, num_groups=3, feature_axis=1)  # noqa: E731
    elif name == "layer_norm":
        y = of_torch.layer_norm(arrays[0], (6,), *arrays[1:])
        ours = jaxgrad.layer_norm
    else:
        y = of_torch.rms_norm(arrays[0], (6,), arrays[1]) + arrays[2]
        ours = lambda x, s, b: jaxgrad.rms_norm(x, s, b, epsilon=np.finfo(np.float64).eps)  # noqa: E731
    dy = np.sin(np.arange(x.size)).reshape(x.shape)
    y.backward(torch.tensor(dy))
    found, pullback = jax.vjp(ours, x, SCALE, BIAS)
    _close((found, *pullback(dy)), (y.detach().numpy(), *(a.grad.numpy() for a in arrays)))
