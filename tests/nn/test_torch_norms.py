"""`GroupNorm`, `InstanceNorm`, `LayerNorm` and `RMSNorm` of `jaxgrad.nn`: their arguments, and those of PyTorch."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from converted_gru import random_like

from jaxgrad import nn
from jaxgrad.convert import NormWeights
from jaxgrad.convert import torch as convert

pytestmark = pytest.mark.jax_version

LAYERS = {
    "group": (nn.GroupNorm(3, 6), (4, 6, 5, 2)),
    "instance": (nn.InstanceNorm(6, affine=True), (4, 6, 5)),
    "layer": (nn.LayerNorm((5, 2)), (4, 6, 5, 2)),
    "rms": (nn.RMSNorm(5), (4, 5)),
}


def _normal(shape, seed=0):
    return 1 + np.random.default_rng(seed).normal(size=shape)


@pytest.mark.parametrize("kind", LAYERS)
def test_layers_are_pytrees(kind):
    layer, shape = LAYERS[kind]
    leaves, structure = jax.tree.flatten(layer)
    assert [leaf.dtype for leaf in leaves] == [jnp.float32] * (1 if kind == "rms" else 2)
    np.testing.assert_array_equal(leaves[0], np.ones(leaves[0].shape))
    assert not any(map(np.any, leaves[1:]))
    x = _normal(shape)
    gradient = jax.jit(jax.grad(lambda layer: layer(x, residual=x, activation="silu").sum()))(layer)
    assert jax.tree.structure(gradient) == structure
    assert all(map(np.any, jax.tree.leaves(gradient)))
    expected = jax.nn.silu(layer(x) + x)
    np.testing.assert_allclose(layer(x, residual=x, activation="silu"), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("of", "arguments", "settings", "shape"),
    [
        ("GroupNorm", (3, 6), {"eps": 1e-2}, (4, 6, 5, 2)),
        ("GroupNorm", (2, 6), {"affine": False}, (4, 6)),
        ("InstanceNorm1d", (6,), {"eps": 1e-2, "affine": True}, (4, 6, 5)),
        ("InstanceNorm2d", (6,), {}, (4, 6, 5, 2)),
        ("InstanceNorm3d", (6,), {"affine": True}, (4, 6, 5, 2, 3)),
        ("LayerNorm", (5,), {"eps": 1e-2}, (4, 5)),
        ("LayerNorm", ((5, 2),), {"bias": False}, (4, 6, 5, 2)),
        ("LayerNorm", ([5, 2],), {"elementwise_affine": False}, (6, 5, 2)),
        ("RMSNorm", (5,), {"eps": 1e-2}, (4, 5)),
        ("RMSNorm", ((5, 2),), {}, (4, 6, 5, 2)),
        ("RMSNorm", (5,), {"elementwise_affine": False}, (4, 5)),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_matches_torch(torch, of, arguments, settings, shape, dtype):
    """Values, and gradients of x and the weights, also where eps decides."""
    theirs = getattr(torch.nn, of)(*arguments, **settings, dtype=getattr(torch, dtype))
    for number, parameter in enumerate(theirs.parameters()):
        parameter.data[:] = torch.from_numpy(_normal(parameter.shape, number + 1))
    made = getattr(nn, of[:12] if of.startswith("Instance") else of)(*arguments, **settings, dtype=dtype)
    arrays = [jnp.asarray(p.detach().double().numpy(), dtype) for p in theirs.parameters()]
    ours = jax.tree.unflatten(jax.tree.structure(made), arrays)
    tolerance = {"float64": 1e-11, "float32": 3e-5, "bfloat16": 4e-2}[dtype]

    def run(layer, x):
        y, pullback = jax.vjp(lambda layer, x: layer(x), layer, x)
        return y, *jax.tree.leaves(pullback(jnp.cos(jnp.arange(x.size)).reshape(x.shape).astype(x.dtype)))

    for size in (1.0, 1e-3):
        x = jnp.asarray(size * _normal(shape), dtype)
        given = torch.tensor(np.asarray(x, np.float64), dtype=getattr(torch, dtype), requires_grad=True)
        y = theirs(given)
        theirs.zero_grad()
        y.backward(torch.cos(torch.arange(x.size, dtype=torch.float64)).reshape(shape).to(y.dtype))
        expected = (y, *(parameter.grad for parameter in theirs.parameters()), given.grad)
        found = jax.jit(run)(ours, x)
        for a, e in zip(found, expected, strict=True):
            e = e.detach().double().numpy()
            assert a.dtype == dtype
            np.testing.assert_allclose(np.asarray(a, np.float64), e, rtol=0, atol=tolerance * np.abs(e).max())


@pytest.mark.parametrize(
    ("kind", "settings"), [("group", {"num_groups": 3}), ("instance", {}), ("layer", {}), ("rms", {})]
)
def test_from_weights(kind, settings):
    layer, shape = LAYERS[kind]
    state = random_like(convert.write_norm(layer.weights))
    record = convert.read_norm(state, kind=kind, **settings)
    found = type(layer).from_weights(record)
    assert jax.tree.structure(found) == jax.tree.structure(layer)
    x = jnp.asarray(_normal(shape), jnp.float32)
    np.testing.assert_array_equal(found(x), record(x))


def test_records_of_other_formats():
    """An int for the axis, no arrays, and arrays with an axis of layers, over which `lax.scan` runs."""
    x = _normal((4, 5))
    record = NormWeights(jnp.asarray(_normal((3, 5))), None, kind="layer", epsilon=0.1, axis=-1)
    layers = nn.LayerNorm.from_weights(record)
    found, _ = jax.lax.scan(lambda x, layer: (layer(x), None), x, layers)
    expected = x
    for scale in record.scale:
        expected = NormWeights(scale, None, kind="layer", epsilon=0.1)(expected)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12)
    plain = nn.RMSNorm(5, elementwise_affine=False, dtype="float64")
    np.testing.assert_array_equal(nn.RMSNorm.from_weights(plain.weights)(x), plain(x))


@pytest.mark.parametrize("kind", LAYERS)
def test_examples_and_empty_batches(kind):
    layer, shape = LAYERS[kind]
    x = _normal(shape)
    each = jax.vmap(lambda x: layer(x[None])[0])(x)
    np.testing.assert_allclose(each, layer(x), rtol=0, atol=1e-12)
    assert layer(x[:0]).shape == (0, *shape[1:])
    for dtype in ("float32", "bfloat16"):  # of the weights; x is float64
        cast = jax.tree.map(lambda a, dtype=dtype: a.astype(dtype), layer)
        np.testing.assert_allclose(cast(x), layer(x), rtol=0, atol=1e-12)


def test_the_default_epsilon_of_rms_norm():
    """That of the arithmetic."""
    for dtype, expected in (
        ("float64", 2.0**-52),
        ("float32", 2.0**-23),
        ("bfloat16", 2.0**-23),
        ("float16", 2.0**-23),
    ):
        scale = jnp.ones(5, dtype)
        assert nn.RMSNorm(5, dtype=dtype).weights.epsilon == expected
        assert convert.read_norm({"weight": scale}, kind="rms").epsilon == expected


def test_16_bit_x_with_float32_weights():
    x = jnp.asarray(_normal((4, 6, 5)), "bfloat16")
    y = nn.GroupNorm(3, 6)(x)
    assert y.dtype == "bfloat16"
    np.testing.assert_allclose(np.float64(y), nn.GroupNorm(3, 6)(np.float64(x)), rtol=0, atol=2e-2)
    layer = random_like(nn.GroupNorm(3, 6))  # its weights are not rounded to 16 bits
    np.testing.assert_array_equal(layer(x), layer.weights(x))


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: nn.GroupNorm(0, 6), ValueError, "jaxgrad.nn.GroupNorm: num_groups must be positive, got 0"),
        (lambda: nn.GroupNorm(4, 6), ValueError, "num_groups must divide num_channels, 6, got 4"),
        (lambda: nn.GroupNorm(3, 6, affine=1), TypeError, "affine must be"),
        (lambda: nn.GroupNorm(3, 6, -1.0), ValueError, "eps must be"),
        (lambda: nn.InstanceNorm(1.5), TypeError, "num_features must be an int, got float"),
        (lambda: nn.LayerNorm(()), ValueError, "normalized_shape must have a size"),
        (lambda: nn.LayerNorm("ab"), TypeError, "jaxgrad.nn.LayerNorm: normalized_shape must"),
        (lambda: nn.LayerNorm(5, dtype=int), TypeError, "dtype must have one of the dtypes .*, got int64"),
        (lambda: nn.LayerNorm(5, dtype="wide"), TypeError, "dtype must be a dtype, got 'wide'"),
        (lambda: nn.LayerNorm((5, 0)), ValueError, "normalized_shape must be positive, got 0"),
        (
            lambda: nn.LayerNorm(7, elementwise_affine=False)(jnp.ones((2, 5))),
            ValueError,
            r"the last axes of x must be normalized_shape, \(7,\), got \(2, 5\)",
        ),
        (
            lambda: nn.LayerNorm(5)(jnp.ones((2, 5), int)),
            TypeError,
            "jaxgrad.nn.LayerNorm: x must have one of the dtypes",
        ),
        (
            lambda: nn.GroupNorm(6, 6)(jnp.ones((2, 12, 5))),
            ValueError,
            "x must have 6 channels in axis 1, got the shape",
        ),
        (lambda: nn.GroupNorm(3, 6, affine=False)(jnp.ones((2, 9))), ValueError, "x must have 6 channels in axis 1"),
        (lambda: nn.GroupNorm(3, 6)(jnp.ones(6)), ValueError, "x must have rank 2 or more, got the shape"),
        (lambda: nn.InstanceNorm(6)(jnp.ones((2, 6))), ValueError, "x must have rank 3 or more, got the shape"),
        (lambda: nn.InstanceNorm(6)(jnp.ones((6, 8, 8))), ValueError, "x must have 6 channels in axis 1"),
        (lambda: nn.RMSNorm.from_weights(3), TypeError, "jaxgrad.nn.RMSNorm: weights must be"),
        (lambda: nn.RMSNorm.from_weights(nn.LayerNorm(5).weights), ValueError, 'kind "rms", got "layer"'),
        (
            lambda: nn.GroupNorm.from_weights(NormWeights(None, None, kind="group", epsilon=0.1, num_groups=1)),
            ValueError,
            "the axis of weights must be 1, got -1",
        ),
        (
            lambda: nn.LayerNorm.from_weights(NormWeights(jnp.ones(5), None, kind="layer", epsilon=0.1, axis=1)),
            ValueError,
            "the axis of weights must be the last axes, got 1",
        ),
    ],
)
def test_errors(call, error, text):
    with pytest.raises(error, match=text):
        call()
