"""Values and gradients of resize against `jax.image.resize` in float64."""

from __future__ import annotations

import itertools
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from backends import SELECTED, float64_on_cpu
from tolerances import EPS, assert_close, input_dtype

import jaxgrad

BACKENDS = SELECTED

# Shapes of an image and of its result.
GROWING = [
    ((2, 5, 7, 3), (2, 10, 21, 3)),  # channels last
    ((2, 3, 4, 5), (2, 3, 32, 25)),  # channels first
    ((1, 3, 4), (27, 27, 4)),  # one element, and a factor with another rule
    ((0, 4, 3), (0, 8, 3)),
]
SHRINKING = [
    ((2, 3, 15, 16), (2, 3, 3, 2)),  # every window reaches an edge
    ((3, 2, 4, 6, 2), (3, 4, 2, 6, 2)),  # one axis grows, another shrinks
    ((8, 18), (1, 2)),
    ((6, 10, 4), (18, 7, 2)),  # one factor is not whole
]
METHODS = ["nearest", "linear", "without antialias"]
MIXED = SHRINKING[1]


def _resize(function, shape, method: str):
    method, antialias = ("linear", False) if method == "without antialias" else (method, True)
    return partial(function, shape=shape, method=method, antialias=antialias)


def _inputs(old, new, dtype: str):
    draw = np.random.default_rng(len(old) + sum(new)).standard_normal
    return tuple(np.asarray(draw(shape), input_dtype(dtype)) for shape in (old, new))


def _value_and_gradient(resize, x, dy):
    y, pullback = jax.vjp(resize, x)
    return y, *pullback(dy)


@cache
def _expected(old, new, method: str, dtype: str):
    with float64_on_cpu():
        inputs = (np.asarray(a, np.float64) for a in _inputs(old, new, dtype))
        results = jax.jit(partial(_value_and_gradient, _resize(jax.image.resize, new, method)))(*inputs)
        return tuple(map(np.asarray, results))


def _found(backend, old, new, method: str, dtype: str):
    call = jax.jit(partial(_value_and_gradient, _resize(jaxgrad.resize, new, method)))
    return call(*backend.put(_inputs(old, new, dtype)))


@pytest.mark.jax_version
@pytest.mark.parametrize(
    ("case", "method"),
    [*itertools.product(GROWING, METHODS[:2]), *itertools.product(SHRINKING, METHODS)],
    ids=str,
)
def test_float64(backend, case, method):
    for a, b in zip(_found(backend, *case, method, "float64"), _expected(*case, method, "float64"), strict=True):
        assert_close(a, b, dtype="float64", terms=1)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_16_bits(backend, dtype, method):
    """Results are rounded once: by half an eps each, but for the errors of float32."""
    for a, b in zip(_found(backend, *MIXED, method, dtype), _expected(*MIXED, method, dtype), strict=True):
        assert_close(a, b, dtype=dtype, terms=1)
        atol = 8 * EPS["float32"] * np.abs(b).max()
        np.testing.assert_allclose(np.asarray(a, np.float64), b, rtol=EPS[dtype] / 2, atol=atol)


@pytest.mark.jax_version
@pytest.mark.parametrize("method", ["nearest", "linear"])
@pytest.mark.parametrize("dtype", ["bool", "int32", "complex64"])
def test_other_dtypes(dtype, method):
    x = np.random.default_rng(0).integers(0, 2 if dtype == "bool" else 100, (4, 6)).astype(dtype)
    expected, found = (f(x, (8, 3), method) for f in (jax.image.resize, jaxgrad.resize))
    assert found.dtype == expected.dtype
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("method", METHODS)
def test_equal_sizes(method):
    for x in (np.ones((3, 2), np.int32), jnp.ones(()), jnp.ones((0, 2))):
        found, expected = (_resize(f, x.shape, method)(x) for f in (jaxgrad.resize, jax.image.resize))
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
        np.testing.assert_array_equal(found, x)


@pytest.mark.jax_version
def test_keys():
    keys = jax.random.split(jax.random.key(0), 6).reshape(2, 3)
    for shape in ((4, 1), (6, 27)):
        assert (jaxgrad.resize(keys, shape, "nearest") == jax.image.resize(keys, shape, "nearest")).all()


@pytest.mark.parametrize(("old", "new"), [(4099, 8198), (8198, 4099), (12297, 4099), (1365, 4095), (5, 50), (50, 5)])
def test_nearest_indices(old, new):
    """Those of exact arithmetic. `jax.image.resize` computes them in float32, and has others in a long axis."""
    expected = (2 * np.arange(new) + 1) * old // (2 * new)
    np.testing.assert_array_equal(jaxgrad.resize(np.arange(old), (new,), "nearest"), expected)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("shapes", [((6, 4), (12, 12)), ((12, 12), (6, 4))], ids=str)
def test_values_that_are_not_finite(shapes, method):
    """They reach the results and gradients that have a weight for them, and no others."""

    inputs = [(np.arange(np.prod(s)) == np.prod(s) // 2).reshape(s).astype(np.float32) for s in shapes]
    weights = _value_and_gradient(_resize(jax.image.resize, shapes[1], method), *inputs)
    for value in (np.inf, -np.inf, np.nan):
        special = [np.where(a == 1, np.float32(value), a) for a in inputs]
        found = _value_and_gradient(_resize(jaxgrad.resize, shapes[1], method), *special)
        for a, weight in zip(found, weights, strict=True):
            np.testing.assert_array_equal(a, np.where(np.abs(weight) < 1e-6, 0, value))


@pytest.mark.jax_version
@pytest.mark.parametrize("method", jax.image.ResizeMethod)
def test_methods(method):
    x = np.random.default_rng(0).standard_normal((4, 6)).astype(np.float32)
    expected = jax.image.resize(x, (3, 12), method)
    for name in (method, method.name.lower().replace("_", "-")):
        np.testing.assert_allclose(jaxgrad.resize(x, (3, 12), name), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["bilinear", "trilinear", "triangle"])
def test_synonyms_of_linear(name):
    x = np.random.default_rng(0).standard_normal(6)
    np.testing.assert_array_equal(jaxgrad.resize(x, (12,), name), jaxgrad.resize(x, (12,), "linear"))


@pytest.mark.jax_version
def test_precision_reaches_jax():
    program = str(jax.make_jaxpr(lambda x: jaxgrad.resize(x, (5, 8), "linear", precision="default"))(jnp.ones((3, 4))))
    assert "DEFAULT" in program
    assert "HIGHEST" not in program
