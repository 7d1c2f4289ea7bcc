"""Convolution layers of flax, equinox and haiku that run on jaxgrad, against the same layers on `jax.lax`.

flax takes the convolution as an argument. Layers without this argument run on jaxgrad once it is assigned to the names
in `jax.lax`.
"""

from __future__ import annotations

import inspect
from functools import partial

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from backends import SELECTED
from flax import nnx
from thorough import oldest_one_in
from tolerances import EPS, assert_close

import jaxgrad

pytestmark = pytest.mark.jax_version

hk = pytest.importorskip("haiku")

BACKENDS = SELECTED
CONV = {"conv_general_dilated": jaxgrad.conv_general_dilated}
PATCHED = {**CONV, "conv_transpose": jaxgrad.conv_transpose}

# Spatial sizes of the input, features of the result, arguments of the layer. The input has FEATURES features.
FEATURES = 8
FLAX_CASES = {
    "same": ((9, 7), 6, {"kernel_size": (3, 2)}),
    "valid": ((9, 7), 6, {"kernel_size": (3, 2), "strides": (2, 3), "padding": "VALID"}),
    "one size": ((9, 7), 6, {"kernel_size": (3, 3), "strides": 2, "padding": 1, "use_bias": False}),
    "pairs": ((9, 7), 6, {"kernel_size": (3, 2), "padding": ((1, 0), (2, 1)), "kernel_dilation": (2, 1)}),
    "circular": ((9, 7), 6, {"kernel_size": (3, 2), "strides": (2, 1), "padding": "CIRCULAR"}),
    "reflect": ((9, 7), 6, {"kernel_size": (3, 4), "padding": "REFLECT"}),
    "causal": ((23,), 6, {"kernel_size": (3,), "padding": "CAUSAL", "kernel_dilation": 2}),
    "input dilation": ((9, 7), 6, {"kernel_size": (3, 4), "padding": ((2, 1), (1, 2)), "input_dilation": (2, 1)}),
    "groups": ((9, 7), 12, {"kernel_size": (3, 2), "feature_group_count": 4, "strides": (2, 1)}),
    "depthwise": ((9, 7), 16, {"kernel_size": (3, 3), "feature_group_count": 8, "padding": "CIRCULAR"}),
    "three dimensions": ((5, 4, 6), 6, {"kernel_size": (3, 2, 3), "strides": (1, 2, 1)}),
    "bfloat16": ((9, 7), 6, {"kernel_size": (3, 2), "dtype": jnp.bfloat16}),
    "precision": ((9, 7), 6, {"kernel_size": (3, 2), "precision": jax.lax.Precision.HIGHEST}),
}
FLAX_TRANSPOSE_CASES = {
    "same": ((5, 4), 6, {"kernel_size": (3, 2), "strides": (2, 3)}),
    "valid": ((5, 4), 6, {"kernel_size": (4, 3), "strides": (2, 2), "padding": "VALID"}),
    "pairs": ((5, 4), 6, {"kernel_size": (4, 3), "strides": (2, 1), "padding": ((2, 1), (1, 2))}),
    "circular": ((5, 4), 6, {"kernel_size": (4, 4), "strides": (2, 2), "padding": "CIRCULAR"}),
    "transposed kernel": ((5, 4), 6, {"kernel_size": (3, 2), "strides": (2, 2), "transpose_kernel": True}),
    "dilation": ((5, 4), 6, {"kernel_size": (3, 2), "kernel_dilation": (1, 2), "padding": "VALID"}),
}
HAIKU_CASES = {
    "same": (hk.Conv2D, (9, 7), {"output_channels": 6, "kernel_shape": (3, 2)}),
    "valid": (hk.Conv2D, (9, 7), {"output_channels": 6, "kernel_shape": 3, "stride": (2, 1), "padding": "VALID"}),
    "pairs": (hk.Conv2D, (9, 7), {"output_channels": 6, "kernel_shape": (3, 2), "padding": ((1, 0), (2, 1))}),
    "causal": (hk.Conv1D, (23,), {"output_channels": 6, "kernel_shape": 3, "rate": 2, "padding": hk.pad.causal}),
    "groups": (hk.Conv2D, (9, 7), {"output_channels": 12, "kernel_shape": (3, 2), "feature_group_count": 4}),
    "depthwise": (hk.DepthwiseConv2D, (9, 7), {"channel_multiplier": 2, "kernel_shape": 3, "stride": 2}),
    "three dimensions": (hk.Conv3D, (5, 4, 6), {"output_channels": 6, "kernel_shape": (3, 2, 3), "rate": (2, 1, 1)}),
    "transposed": (hk.Conv2DTranspose, (5, 4), {"output_channels": 6, "kernel_shape": (3, 2), "stride": (2, 3)}),
    "transposed, valid": (
        hk.Conv2DTranspose,
        (5, 4),
        {"output_channels": 6, "kernel_shape": 4, "stride": 2, "padding": "VALID"},
    ),
    "transposed, output shape": (
        hk.Conv2DTranspose,
        (5, 4),
        {"output_channels": 6, "kernel_shape": 3, "stride": 2, "output_shape": (10, 8)},
    ),
}
_EQX = {"in_channels": FEATURES, "out_channels": 6, "dtype": jnp.float32}
EQUINOX_CASES = {
    "same": (eqx.nn.Conv2d, (9, 7), {**_EQX, "kernel_size": (3, 2), "padding": "SAME"}),
    "same, lower": (eqx.nn.Conv2d, (9, 7), {**_EQX, "kernel_size": (4, 2), "padding": "SAME_LOWER"}),
    "valid": (eqx.nn.Conv2d, (9, 7), {**_EQX, "kernel_size": 3, "stride": (2, 3), "padding": "VALID"}),
    "one size": (eqx.nn.Conv2d, (9, 7), {**_EQX, "kernel_size": 3, "padding": 1, "dilation": 2, "use_bias": False}),
    "pairs": (eqx.nn.Conv2d, (9, 7), {**_EQX, "kernel_size": (3, 2), "padding": ((1, 0), (2, 1))}),
    "circular": (eqx.nn.Conv2d, (9, 7), {**_EQX, "kernel_size": 3, "padding": 1, "padding_mode": "CIRCULAR"}),
    "groups": (eqx.nn.Conv1d, (23,), {**_EQX, "out_channels": 12, "kernel_size": 3, "groups": 4}),
    "three dimensions": (eqx.nn.Conv3d, (5, 4, 6), {**_EQX, "kernel_size": (3, 2, 3), "padding": 1}),
    "transposed": (
        eqx.nn.ConvTranspose2d,
        (5, 4),
        {**_EQX, "kernel_size": (3, 4), "stride": 2, "padding": 1, "output_padding": (1, 0)},
    ),
    "transposed, same": (eqx.nn.ConvTranspose2d, (5, 4), {**_EQX, "kernel_size": 4, "stride": 2, "padding": "SAME"}),
    "transposed, groups": (
        eqx.nn.ConvTranspose2d,
        (5, 4),
        {**_EQX, "out_channels": 12, "kernel_size": (3, 2), "stride": 2, "groups": 4},
    ),
}


def _random(tree, seed=0):
    """A tree of the same shapes and dtypes; biases are initialized with zeros, which no gradient depends on."""
    leaves, structure = jax.tree.flatten(tree)
    rng = np.random.default_rng(seed)
    return jax.tree.unflatten(structure, [jnp.asarray(rng.normal(size=a.shape), a.dtype) / 2 for a in leaves])


def _patch(monkeypatch):
    for name, op in PATCHED.items():
        monkeypatch.setattr(jax.lax, name, op)


def _linen(layer_class, spatial, features, settings, **op):
    """`apply(params, x)`, params and x of a layer."""
    layer = layer_class(features, **settings, **op)
    x = _random(jnp.zeros((3, *spatial, FEATURES), jnp.float32), 1)
    return layer.apply, _random(jax.eval_shape(layer.init, jax.random.key(0), x)), x


def _nnx(layer_class, spatial, features, settings, **op):
    layer = layer_class(FEATURES, features, **settings, **op, rngs=nnx.Rngs(0))
    graph, params = nnx.split(layer)
    x = _random(jnp.zeros((3, *spatial, FEATURES), jnp.float32), 1)
    return lambda params, x: nnx.merge(graph, params)(x), _random(params), x


def _haiku(layer_class, spatial, settings):
    transformed = hk.without_apply_rng(hk.transform(lambda x: layer_class(**settings)(x)))
    x = _random(jnp.zeros((3, *spatial, FEATURES), jnp.float32), 1)
    return transformed.apply, _random(jax.eval_shape(transformed.init, jax.random.key(0), x)), x


def _equinox(layer_class, spatial, settings):
    layer = layer_class(**settings, key=jax.random.key(0))
    params, static = eqx.partition(layer, eqx.is_array)
    x = _random(jnp.zeros((3, FEATURES, *spatial), jnp.float32), 1)
    return lambda params, x: jax.vmap(eqx.combine(params, static))(x), _random(params), x


def _result(layer, params, x):
    """The value and the gradients of all parameters and of x, and the program that computes them."""

    def run(params, x):
        y, pullback = jax.vjp(layer, params, x)
        dy = jnp.cos(jnp.arange(y.size, dtype=y.dtype)).reshape(y.shape)
        return y, pullback(dy)

    traced = jax.jit(run).trace(params, x)
    return traced.lower().compile()(params, x), str(traced.jaxpr)


def _check(found, expected, dtype="float32"):
    """Compares `_result` on jaxgrad with that on `jax.lax`."""
    (actual, program), (desired, program_of_lax) = found, expected
    assert "jaxgrad.conv_" in program
    assert "jaxgrad.conv_" not in program_of_lax
    assert jax.tree.structure(actual) == jax.tree.structure(desired)
    for a, d in zip(jax.tree.leaves(actual), jax.tree.leaves(desired), strict=True):
        assert a.dtype == d.dtype
        if dtype == "float32":
            assert_close(a, d, dtype=dtype, terms=500)
        else:  # both results are rounded, before some are converted to float32
            d = np.asarray(d, np.float32)
            np.testing.assert_allclose(np.asarray(a, np.float32), d, rtol=0, atol=4 * EPS[dtype] * np.abs(d).max())


def _dtype(settings):
    return np.dtype(settings.get("dtype", np.float32)).name


@pytest.mark.each_value  # linen and nnx make the same call
@pytest.mark.parametrize("build", [_linen, _nnx])
@pytest.mark.parametrize("name", FLAX_CASES)
def test_flax(build, name, backend):
    """The op as the argument `conv_general_dilated`."""
    layer_class = {_linen: nn.Conv, _nnx: nnx.Conv}[build]
    spatial, features, settings = FLAX_CASES[name]
    found, expected = (build(layer_class, spatial, features, settings, **op) for op in (CONV, {}))
    args = backend.put(expected[1:])
    _check(_result(found[0], *args), _result(expected[0], *args), _dtype(settings))


@pytest.mark.each_value  # linen and nnx make the same call
@pytest.mark.parametrize("build", [_linen, _nnx])
@pytest.mark.parametrize("name", FLAX_TRANSPOSE_CASES)
def test_flax_transpose(build, name, backend, monkeypatch):
    layer_class = {_linen: nn.ConvTranspose, _nnx: nnx.ConvTranspose}[build]
    layer, *args = build(layer_class, *FLAX_TRANSPOSE_CASES[name])
    args = backend.put(args)
    expected = _result(layer, *args)
    _patch(monkeypatch)
    _check(_result(partial(layer), *args), expected)


@pytest.mark.parametrize("name", ["same", "circular", "groups"])
def test_flax_linen_on_the_names_in_lax(name, backend, monkeypatch):
    layer, *args = _linen(nn.Conv, *FLAX_CASES[name])
    args = backend.put(args)
    expected = _result(layer, *args)
    _patch(monkeypatch)
    _check(_result(partial(layer), *args), expected)


def test_flax_linen_takes_a_factory():
    """`conv_general_dilated_cls` replaces the deprecated argument."""
    spatial, features, settings = FLAX_CASES["same"]
    factory = {"conv_general_dilated_cls": lambda: jaxgrad.conv_general_dilated}
    found, expected = (_linen(nn.Conv, spatial, features, settings, **op) for op in (factory, {}))
    _check(_result(found[0], *expected[1:]), _result(expected[0], *expected[1:]))


def test_flax_linen_without_shared_weights():
    """`ConvLocal` calls the op for the shape of the result."""
    spatial, features, settings = (9, 7), 6, {"kernel_size": (3, 2), "strides": (2, 1)}
    found, expected = (_linen(nn.ConvLocal, spatial, features, settings, **op) for op in (CONV, {}))
    assert jax.tree.map(jnp.shape, found[1]) == jax.tree.map(jnp.shape, expected[1])
    np.testing.assert_array_equal(found[0](*found[1:]), expected[0](*expected[1:]))


def test_flax_nnx_preferred_element_type():
    spatial, features, settings = FLAX_CASES["bfloat16"]
    settings = {**settings, "preferred_element_type": jnp.float32}
    found, expected = (_nnx(nnx.Conv, spatial, features, settings, **op) for op in (CONV, {}))
    _check(_result(found[0], *expected[1:]), _result(expected[0], *expected[1:]), "bfloat16")


@pytest.mark.parametrize("name", oldest_one_in(3, HAIKU_CASES))
def test_haiku(name, backend, monkeypatch):
    layer, *args = _haiku(*HAIKU_CASES[name])
    args = backend.put(args)
    expected = _result(layer, *args)
    _patch(monkeypatch)
    _check(_result(partial(layer), *args), expected)


@pytest.mark.parametrize("name", oldest_one_in(3, EQUINOX_CASES))
def test_equinox(name, backend, monkeypatch):
    layer, *args = _equinox(*EQUINOX_CASES[name])
    args = backend.put(args)
    expected = _result(layer, *args)
    _patch(monkeypatch)
    _check(_result(partial(layer), *args), expected)


_PATCHED_FIRST = """
import jax, jax.numpy as jnp
import jaxgrad
jax.lax.conv_general_dilated, jax.lax.conv_transpose = jaxgrad.conv_general_dilated, jaxgrad.conv_transpose
from flax import nnx

x = jnp.ones((4, 9, 7, 8))
layers = nnx.Conv(8, 6, (3, 2), rngs=nnx.Rngs(0)), nnx.ConvTranspose(8, 6, (3, 2), rngs=nnx.Rngs(0))
for layer in layers:
    graph, params = nnx.split(layer)
    gradient = jax.grad(lambda params: jnp.sum(nnx.merge(graph, params)(x) ** 2))
    assert "jaxgrad.conv_" in str(jax.make_jaxpr(gradient)(params))
    assert all(jnp.abs(g).max() > 0 for g in jax.tree.leaves(gradient(params)))
"""


def test_names_in_lax_assigned_before_flax_is_imported(run_python):
    """`nnx.Conv` takes its default from `jax.lax` when flax is imported."""
    run_python(_PATCHED_FIRST)


_OVER_A_MESH = """
import jax, jax.numpy as jnp, numpy as np
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
import jaxgrad

devices = jax.make_mesh((4, 2), ("d", "m"), axis_types=(AxisType.Explicit,) * 2)
x = jax.random.normal(jax.random.key(0), (8, 9, 7, 4))
with jax.set_mesh(devices):
    placed = jax.device_put(x, NamedSharding(devices, P("d")))
    results = []
    for settings in {}, {"conv_general_dilated": jaxgrad.conv_general_dilated}:
        layer = nnx.Conv(4, 6, (3, 2), **settings, rngs=nnx.Rngs(0))
        run = nnx.value_and_grad(lambda layer, x: jnp.sum(jnp.sin(layer(x, out_sharding=P("d", None, None, "m")))))
        y = layer(placed, out_sharding=P("d", None, None, "m"))
        assert jax.typeof(y).sharding.spec == P("d", None, None, "m"), jax.typeof(y)
        results.append((y, *jax.tree.leaves(run(layer, placed))))
    for lax, found in zip(*results, strict=True):
        assert jax.typeof(lax) == jax.typeof(found)
        np.testing.assert_allclose(found, lax, rtol=1e-4, atol=1e-4)
"""


@pytest.mark.skipif(
    "out_sharding" not in inspect.signature(nnx.Conv.__call__).parameters, reason="this flax has no out_sharding"
)
def test_flax_nnx_out_sharding(run_python):
    run_python(_OVER_A_MESH, XLA_FLAGS="--xla_force_host_platform_device_count=8", JAX_PLATFORMS="cpu")
