"""Values and gradients of max pooling have the bits of XLA, and those of NumPy where JAX has no gradient."""

from __future__ import annotations

import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from backends import CPU_KERNEL, CUDA
from jax import lax
from pool_cases import (
    CASES,
    PoolCase,
    assert_maxima,
    assert_same_bits,
    make_inputs,
    numpy_reference,
    random_case,
    value_and_gradient,
)
from thorough import one_in, thorough_after
from tolerances import DTYPES

import jaxgrad

BACKENDS = (CPU_KERNEL, CUDA)


def _check(case: PoolCase, dtype: str, backend) -> None:
    x, dy = make_inputs(case, dtype)
    if backend == CUDA:  # sums of 16-bit elements are float32: those of small integers are equal
        dy = np.round(np.float64(dy) * 4).astype(dy.dtype)
    call = jax.jit(value_and_gradient, static_argnums=0)
    y, dx = call(case.op(implementation=backend.implementation), *backend.put((x, dy)))
    expected_y, expected_dx = call(case.lax, *CPU_KERNEL.put((x, dy)))
    assert_maxima(case, x, y, expected_y)
    assert_same_bits(dx, expected_dx)


@pytest.mark.parametrize(("case", "dtype"), one_in(3, itertools.product(CASES, DTYPES), several=True), ids=str)
def test_bits_of_xla(backend, case, dtype):
    _check(case, dtype, backend)


@pytest.mark.parametrize("seed", thorough_after(24, range(2000)))
def test_bits_of_xla_for_random_calls(backend, seed):
    _check(random_case(seed), list(DTYPES)[seed % 4], backend)


@pytest.mark.parametrize("seed", thorough_after(12, range(300)))
@pytest.mark.parametrize("implementation", ["cpu", "xla"])
def test_dilated_windows_against_numpy(seed, implementation):
    case = random_case(seed, dilated=seed % 3 > 0).replace(batch=(2,), channels=3)
    dtype = list(DTYPES)[seed % 4]
    x, dy = make_inputs(case, dtype)
    found = jax.jit(value_and_gradient, static_argnums=0)(case.op(implementation=implementation), x, dy)
    y, dx = numpy_reference(case, x, dy)
    np.testing.assert_array_equal(*(np.asarray(a, np.float64) for a in (found[0], y)))
    if implementation == "cpu":
        assert_same_bits(found[1], dx)
    else:  # sums in another order
        wide = [np.asarray(a, np.float64) for a in (found[1], dx)]
        np.testing.assert_allclose(
            *wide, rtol=0, atol=8 * float(jnp.finfo(x.dtype).eps) * max(1, np.abs(dy).max(initial=0))
        )


@pytest.mark.jax_version
@pytest.mark.parametrize("dtype", DTYPES)
def test_tangent_is_the_transpose_of_the_gradient(dtype):
    """Of every element of x, by NaN and padding too: one call with the tangent, one with the cotangent."""
    case = PoolCase(channels=20)
    x, dy = make_inputs(case, dtype)
    dx = np.arange(x.size).reshape(x.shape).astype(x.dtype)
    with jaxgrad.forward_mode():
        _, tangent = jax.jvp(case.op(implementation="cpu"), (x,), (dx,))
    ones = np.ones_like(dy)
    _, counts = value_and_gradient(case.op(implementation="cpu"), x, ones)
    selected = np.asarray(tangent, np.float64).sum()
    assert np.isclose(selected, np.vdot(np.asarray(counts, np.float64), np.asarray(dx, np.float64)))


@pytest.mark.jax_version
@pytest.mark.parametrize(
    ("padding", "expected"), [("SAME", ((1, 1), (0, 1))), ("SAME_LOWER", ((1, 1), (1, 0))), ("valid", ((0, 0), (0, 0)))]
)
def test_padding_by_name(padding, expected):
    x = np.random.default_rng(0).normal(size=(2, 7, 6, 3)).astype(np.float32)
    named = jaxgrad.max_pool(x, (3, 3), (2, 2), padding)
    assert_same_bits(named, PoolCase(window=(3, 3), strides=(2, 2), padding=expected).lax(x))


@pytest.mark.jax_version
@pytest.mark.parametrize("op", ["max_pool", "avg_pool"])
@pytest.mark.parametrize(
    "padding", [((-1, 2), (0, -2)), ((-8, 9), (3, -4)), ((-9, 4), (0, 0)), ((-3, -4), (1, 1)), ((12, -9), (-6, 8))]
)
def test_negative_padding_removes_elements(op, padding):
    """As it does in `jax.lax.reduce_window`, and more of them than there are."""
    case = PoolCase(padding=padding)
    x, dy = make_inputs(case, "float32", special=False)
    start = -np.inf if op == "max_pool" else 0.0
    config = [(low, high, 0) for low, high in case.in_order(padding, (0, 0), ((0, 0),))]
    unpadded = case.replace(padding=((0, 0), (0, 0)))
    pooled = unpadded.lax if op == "max_pool" else partial(unpadded.lax_mean, count_include_pad=True)
    expected = value_and_gradient(lambda x: pooled(lax.pad(x, np.float32(start), config)), x, dy)
    keywords = {**case.op().keywords, "implementation": "cpu" if x.size else None}
    found = value_and_gradient(partial(getattr(jaxgrad, op), **keywords), x, dy)
    for actual, desired in zip(found, expected, strict=True):
        np.testing.assert_allclose(actual, desired, rtol=1e-6, atol=1e-6)


@pytest.mark.jax_version
def test_special_values_of_the_gradient(backend):
    """NaN and infinities reach the selected elements alone, and -0 adds nothing to 0."""
    case = PoolCase(batch=(3,), channels=20)
    x, dy = make_inputs(case, "float32", special=False)
    rng = np.random.default_rng(0)
    for value in (np.nan, np.inf, -0.0):
        dy[rng.random(dy.shape) < 0.1] = value
    call = jax.jit(value_and_gradient, static_argnums=0)
    _, found = call(
        case.op(implementation=backend.implementation), *backend.put((x, np.where(dy > 1e9, dy, np.round(dy))))
    )
    _, expected = call(case.lax, *CPU_KERNEL.put((x, np.where(dy > 1e9, dy, np.round(dy)))))
    assert_same_bits(found, expected)


@pytest.mark.jax_version
def test_arguments_of_flax():
    linen = pytest.importorskip("flax.linen")
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 9, 8, 3)).astype(np.float32))
    for arguments in (((2, 2),), ((3, 2), (2, 1), "SAME"), ((3, 2), None, ((1, 1), (0, 2)))):
        assert_same_bits(jaxgrad.max_pool(x, *arguments), linen.max_pool(x, *arguments))


@pytest.mark.jax_version
@pytest.mark.parametrize("implementation", ["cpu", "xla"])
def test_many_spatial_axes(implementation):
    """XLA takes any number of spatial axes, the CPU kernels three."""
    x = np.random.default_rng(0).normal(size=(1, 3, 4, 3, 5, 2)).astype(np.float32)
    if implementation == "cpu":
        with pytest.raises(ValueError, match=r"max_pool: implementation='cpu' cannot run: .* 1 to 3 spatial axes"):
            jaxgrad.max_pool(x, (2,) * 4, implementation="cpu")
    case = PoolCase(window=(2,) * 4, strides=(1,) * 4, padding=((0, 0),) * 4, dilation=(1,) * 4, batch=(1,))
    assert_same_bits(jaxgrad.max_pool(x, (2,) * 4), case.lax(x))


def test_results_do_not_depend_on_the_part_of_the_batch():
    """Whatever rows and planes a thread computes together."""
    case = PoolCase(batch=(37,), spatial=(65, 33), window=(5, 3), padding=((2, 3), (1, 1)), channels=1)
    x, dy = make_inputs(case, "float32")
    call = jax.jit(value_and_gradient, static_argnums=0)
    whole = call(case.op(implementation="cpu"), x, dy)
    for i in (0, 17, 36):
        for found, expected in zip(
            whole, call(case.op(implementation="cpu"), x[i : i + 1], dy[i : i + 1]), strict=True
        ):
            assert_same_bits(found[i : i + 1], expected)
