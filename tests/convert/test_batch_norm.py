"""Batch normalization of PyTorch, flax, equinox, Haiku, Keras and ONNX: values, running statistics, and round trips."""

from __future__ import annotations

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from converted_gru import assert_same_bits, normal
from converted_layers import images, loss
from flax import nnx

import jaxgrad.convert.equinox
import jaxgrad.convert.flax
import jaxgrad.convert.haiku
import jaxgrad.convert.keras
import jaxgrad.convert.torch
from jaxgrad.convert import BatchNormWeights

pytestmark = pytest.mark.jax_version

C = 8
VECTORS = {"scale": 1 + normal(C, seed=1), "bias": normal(C, seed=2)}
X, NCHW = 1 + images(5, 4), 1 + images(5, 4, channels_last=False)
WIDE = {"param_dtype": jnp.float64}


def _check(record, x, evaluated, trained, tolerance=1e-12):
    """The layer's own results in evaluation and in training, and its statistics after the training step."""
    np.testing.assert_allclose(record(x), evaluated, rtol=0, atol=tolerance)
    y, after = jax.jit(lambda record: record.train(x))(record)
    for found, expected in zip((y, after.mean, after.var), trained, strict=True):
        np.testing.assert_allclose(np.ravel(found), np.ravel(expected), rtol=0, atol=100 * tolerance)
    return after


def test_torch(torch):
    layer = torch.nn.BatchNorm2d(C, eps=1e-3, momentum=0.3, dtype=torch.float64)
    with torch.no_grad():
        layer.weight[:], layer.bias[:] = (torch.from_numpy(VECTORS[name]) for name in ("scale", "bias"))
        layer(torch.from_numpy(2 * NCHW))  # statistics of a first step
    convert = jaxgrad.convert.torch
    record = convert.read_batch_norm(layer.state_dict(), eps=layer.eps, momentum=layer.momentum)
    assert_same_bits(dict(convert.write_batch_norm(record)), {k: v.numpy() for k, v in layer.state_dict().items()})
    evaluated = layer.eval()(torch.from_numpy(NCHW)).detach()
    trained = layer.train()(torch.from_numpy(NCHW)).detach()
    after = _check(record, NCHW, evaluated, (trained, layer.running_mean, layer.running_var))
    state_dict = {key: torch.from_dlpack(array) for key, array in convert.write_batch_norm(after).items()}
    assert state_dict["num_batches_tracked"] == 2
    layer.load_state_dict(state_dict)
    without = torch.nn.BatchNorm1d(C, affine=False)
    record = convert.read_batch_norm(without.state_dict())
    assert (record.scale, record.bias) == (None, None)
    assert convert.write_batch_norm(record).keys() == without.state_dict().keys()
    with pytest.raises(ValueError, match="state_dict has no running_mean; prefixes with 'running_mean' in it"):
        convert.read_batch_norm(torch.nn.BatchNorm1d(C, track_running_stats=False).state_dict())


def test_linen():
    layer = nn.BatchNorm(momentum=0.8, epsilon=1e-3, force_float32_reductions=False, **WIDE)
    variables = {"params": VECTORS, "batch_stats": {"mean": normal(C, seed=3), "var": normal(C, seed=4) ** 2 + 0.5}}
    convert = jaxgrad.convert.flax
    record = convert.read_batch_norm(variables, layer)
    assert_same_bits(convert.write_batch_norm(record), variables)
    evaluated = layer.apply(variables, X, use_running_average=True)
    y, new = layer.apply(variables, X, use_running_average=False, mutable=["batch_stats"])
    _check(record, X, evaluated, (y, *(new["batch_stats"][name] for name in ("mean", "var"))))
    with pytest.raises(ValueError, match=r"the parameters must have 'mean', got \['params'\]"):
        convert.read_batch_norm({"params": VECTORS}, layer)
    with pytest.raises(ValueError, match=r"layer must have one axis of channels, got axis=\(1, 2\)"):
        convert.read_batch_norm(variables, nn.BatchNorm(axis=(1, 2)))


def test_nnx():
    layer = nnx.BatchNorm(C, use_bias=False, **WIDE, rngs=nnx.Rngs(0))
    layer.mean[...], layer.var[...] = normal(C, seed=3).astype("f4"), normal(C, seed=4).astype("f4") ** 2 + 0.5
    layer.scale[...] = VECTORS["scale"]
    convert = jaxgrad.convert.flax
    record = convert.read_batch_norm(layer)
    assert record.bias is None
    assert_same_bits(convert.write_batch_norm(record, api="nnx"), nnx.to_pure_dict(nnx.state(layer)))
    layer.eval()
    x = X.astype(np.float32)
    narrow = jax.tree.map(lambda a: a.astype(np.float32), record)
    np.testing.assert_allclose(narrow(x), layer(x), rtol=0, atol=1e-5)


@pytest.mark.parametrize("mode", ["batch", "ema"])
def test_equinox(mode):
    layer, state = eqx.nn.make_with_state(eqx.nn.BatchNorm)(C, "batch", eps=1e-3, mode=mode, dtype=jnp.float64)
    layer = eqx.tree_at(lambda layer: (layer.weight, layer.bias), layer, tuple(map(jnp.asarray, VECTORS.values())))
    convert = jaxgrad.convert.equinox

    def run(x, state, inference=False):
        call = lambda x, state: layer(x, state, inference=inference)  # noqa: E731
        return jax.vmap(call, (0, None), (0, None), axis_name="batch")(x, state)

    if mode == "ema":
        with pytest.raises(ValueError, match="state must have running statistics, but the layer was never trained"):
            convert.read_batch_norm(layer, state)
    _, state = run(2 * NCHW, state)
    record = convert.read_batch_norm(layer, state)
    before = jax.tree.leaves((layer, state))
    layer, state = convert.write_batch_norm(record, layer, state)
    assert_same_bits(jax.tree.leaves((layer, state)), before)
    evaluated, state = run(NCHW, state, inference=True)
    y, state = run(NCHW, state)
    after = convert.read_batch_norm(layer, state)
    if mode == "batch":
        assert_same_bits(_check(record, NCHW, evaluated, (y, after.mean, after.var)).steps, after.steps)
    else:  # equinox normalizes by the running statistics
        np.testing.assert_allclose(record(NCHW), evaluated, rtol=0, atol=1e-12)
    with pytest.raises(ValueError, match=r"layer must have eps=0.1 of the weights, got 0.001"):
        convert.write_batch_norm(_of(record, epsilon=0.1), layer, state)
    # A record without a count of steps: inference is the same.
    other = _of(record, sums=None, steps=None)
    written, state = convert.write_batch_norm(other, layer, state)
    np.testing.assert_allclose(convert.read_batch_norm(written, state)(NCHW), record(NCHW), rtol=0, atol=1e-12)


def _of(record, **changes):
    names = ("scale", "bias", "mean", "var", "steps", "sums", "epsilon", "momentum", "unbiased", "feature_axis")
    return BatchNormWeights(**{**{name: getattr(record, name) for name in names}, **changes})


@pytest.mark.parametrize("data_format", ["channels_last", "channels_first"])
def test_haiku(data_format):
    def layer(x, is_training):
        return hk.BatchNorm(True, True, 0.9, data_format=data_format, name="norm")(x, is_training)

    module, x = hk.without_apply_rng(hk.transform_with_state(layer)), X if data_format == "channels_last" else NCHW
    params, state = module.init(jax.random.key(0), x, True)
    params = {"norm": {name: VECTORS[own].reshape(params["norm"][name].shape) for name, own in _NAMES.items()}}
    _, state = module.apply(params, state, 2 * x, True)
    convert = jaxgrad.convert.haiku
    record = convert.read_batch_norm(params, state, "norm", decay_rate=0.9, data_format=data_format)
    written = convert.write_batch_norm(record, "norm")
    assert_same_bits(written, (params, {key: dict(value) for key, value in state.items()}))
    evaluated, _ = module.apply(params, state, x, False)
    y, new = module.apply(params, state, x, True)
    statistics = (new[f"norm/~/{name}_ema"]["average"] for name in ("mean", "var"))
    after = _check(record, x, evaluated, (y, *statistics))
    assert after.steps == 2
    with pytest.raises(ValueError, match=r"state must have the module 'other', got .* named \['norm'\]"):
        convert.read_batch_norm(params, state, "other", decay_rate=0.9)


_NAMES = {"scale": "scale", "offset": "bias"}


def test_keras():
    keras = pytest.importorskip("keras")
    layer = keras.layers.BatchNormalization(momentum=0.8)
    layer.build(X.shape)
    arrays = [*VECTORS.values(), normal(C, seed=3), normal(C, seed=4) ** 2 + 0.5]
    layer.set_weights([a.astype(np.float32) for a in arrays])
    x = X.astype(np.float32)
    convert = jaxgrad.convert.keras
    record = convert.read_batch_norm(layer)
    assert_same_bits(convert.write_batch_norm(record), layer.get_weights())
    evaluated, trained = layer(x), layer(x, training=True)
    after = _check(record, x, evaluated, (trained, layer.moving_mean, layer.moving_variance), 1e-6)
    layer.set_weights(convert.write_batch_norm(after))
    with pytest.raises(ValueError, match=r"layer must be a built keras.layers.BatchNormalization, got BatchNorm"):
        convert.read_batch_norm(keras.layers.BatchNormalization())


def test_onnx():
    onnx = pytest.importorskip("onnx")
    from onnx.reference import ReferenceEvaluator

    import jaxgrad.convert.onnx as convert

    helper = onnx.helper
    names = ("scale", "B", "input_mean", "input_var")
    arrays = [*VECTORS.values(), normal(C, seed=3), normal(C, seed=4) ** 2 + 0.5]
    initializers = [onnx.numpy_helper.from_array(a.astype("f4"), name) for name, a in zip(names, arrays, strict=True)]
    x, y = (helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None) for name in "xy")
    node = helper.make_node("BatchNormalization", ["x", *names], ["y"], "norm", epsilon=1e-3)
    model = helper.make_model(helper.make_graph([node], "g", [x], [y], initializers))
    (record,) = convert.read_batch_norm(model)
    images = NCHW.astype(np.float32)
    expected = ReferenceEvaluator(model).run(None, {"x": images})[0]
    np.testing.assert_allclose(record(images), expected, rtol=0, atol=1e-5)
    assert convert.write_batch_norm(record, model) == model
    _, after = record.train(images)
    assert_same_bits(convert.read_batch_norm(convert.write_batch_norm(after, model))[0], after)
    assert convert.write_batch_norm(_of(record, epsilon=1e-3), model) == model  # which is no float32
    with pytest.raises(ValueError, match=r"the weights for the node 'norm' must have epsilon=0.001.*, got 0.1"):
        convert.write_batch_norm(_of(record, epsilon=0.1), model)


def test_gradients():
    """The running statistics have the gradient zero, in evaluation and in training; scale and bias have their own."""
    arrays = tuple(map(jnp.asarray, (*VECTORS.values(), normal(C, seed=3), normal(C, seed=4) ** 2 + 0.5)))
    record = BatchNormWeights(*arrays, epsilon=1e-3, momentum=0.9)
    for call in (lambda record: record(X), lambda record: record.train(X)[0]):
        gradient = jax.jit(jax.grad(lambda record, call=call: loss(call(record))))(record)
        assert not np.any(gradient.mean)
        assert not np.any(gradient.var)
        dy = np.cos(np.arange(X.size)).reshape(X.shape)
        xhat = (call(record) - record.bias) / record.scale
        np.testing.assert_allclose(gradient.bias, dy.sum((0, 1, 2)), rtol=0, atol=1e-9)
        np.testing.assert_allclose(gradient.scale, (dy * xhat).sum((0, 1, 2)), rtol=0, atol=1e-9)
