"""Average pooling and its derivatives, against `jax.lax.reduce_window` in float64."""

from __future__ import annotations

import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from backends import CPU_KERNEL, CUDA, XLA, XLA_ON_GPU, float64_on_cpu
from op_cases import loss
from pool_cases import CASES, PoolCase, random_case, value_and_gradient
from thorough import one_in, thorough_after
from tolerances import DTYPES, assert_close, input_dtype

import jaxgrad

BACKENDS = (CPU_KERNEL, XLA, XLA_ON_GPU, CUDA)


def _avg_pool(case: PoolCase, **settings):
    return partial(jaxgrad.avg_pool, **{**case.op().keywords, **settings})


def _inputs(case: PoolCase, dtype: str):
    rng = np.random.default_rng([case.seed, 2])
    x = rng.normal(0.5, 1, case.shape).astype(input_dtype(dtype))
    return x, rng.normal(size=case.y_shape).astype(x.dtype)


def _check(case: PoolCase, dtype: str, backend, count_include_pad: bool) -> None:
    x, dy = _inputs(case, dtype)
    op = _avg_pool(case, count_include_pad=count_include_pad, implementation=backend.implementation)
    results = jax.jit(value_and_gradient, static_argnums=0)(op, *backend.put((x, dy)))
    with float64_on_cpu():
        wide = [np.asarray(a, np.float64) for a in (x, dy)]
        expected = value_and_gradient(partial(case.lax_mean, count_include_pad=count_include_pad), *wide)
    for actual, desired in zip(results, expected, strict=True):
        assert actual.dtype == x.dtype
        desired = np.asarray(desired)
        np.testing.assert_array_equal(np.isnan(actual), np.isnan(desired))
        eps = float(jnp.finfo(x.dtype).eps)
        # Gradients are sums of rounded terms, whatever the dtype of the sums.
        found, finite = (np.nan_to_num(np.asarray(a, np.float64)) for a in (actual, desired))
        np.testing.assert_allclose(found, finite, rtol=2 * eps, atol=3 * eps)


@pytest.mark.parametrize("count_include_pad", [True, False])
@pytest.mark.parametrize(("case", "dtype"), one_in(3, itertools.product(CASES, DTYPES), several=True), ids=str)
def test_values_and_gradients(backend, case, dtype, count_include_pad):
    _check(case, dtype, backend, count_include_pad)


@pytest.mark.parametrize("seed", thorough_after(24, range(2000)))
def test_random_calls(seed):
    case = random_case(seed, dilated=seed % 3 == 0)
    _check(case, list(DTYPES)[seed % 4], CPU_KERNEL, bool(seed % 2))


@pytest.mark.jax_version
def test_arguments_of_flax():
    linen = pytest.importorskip("flax.linen")
    x, _ = _inputs(PoolCase(), "float32")
    for arguments in (((2, 2),), ((3, 2), (2, 1), "SAME"), ((3, 2), None, ((1, 1), (0, 1)), False)):
        found, expected = jaxgrad.avg_pool(x, *arguments), linen.avg_pool(jnp.asarray(x), *arguments)
        assert_close(found, expected, dtype="float32", terms=6)


@pytest.mark.jax_version
@pytest.mark.parametrize("case", [PoolCase(), PoolCase(channels_last=False, dilation=(2, 1))], ids=str)
def test_derivatives_to_any_order(backend, case):
    x, _ = _inputs(case, "float64")
    x, direction = backend.put((x, np.cos(np.arange(x.size)).reshape(x.shape)))

    def every(function):
        gradient = jax.grad(lambda x: loss(function(x)))
        penalty = lambda x: jnp.sum(gradient(x) ** 2)  # noqa: E731
        return lambda x: (
            jax.jvp(function, (x,), (direction,)),
            jax.jvp(gradient, (x,), (direction,)),
            jax.grad(penalty)(x),
            jax.jvp(jax.grad(penalty), (x,), (direction,)),
        )

    settings = {"count_include_pad": False, "implementation": backend.implementation}
    with jaxgrad.forward_mode():
        found = jax.jit(every(_avg_pool(case, **settings)))(x)
    expected = jax.jit(every(partial(case.lax_mean, count_include_pad=False)))(x)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-11, atol=1e-12), found, expected)


@pytest.mark.jax_version
@pytest.mark.parametrize("axes", [(0, 0), (None, 0), (0, None), (2, 1)])
def test_vmap(backend, axes):
    case = PoolCase(channels_last=False)
    drawn = [_inputs(case.replace(seed=seed), "float32") for seed in range(3)]
    arrays = [
        drawn[0][i] if axis is None else np.stack([each[i] for each in drawn], axis) for i, axis in enumerate(axes)
    ]
    op = _avg_pool(case, implementation=backend.implementation)
    found = jax.jit(jax.vmap(lambda x, dy: value_and_gradient(op, x, dy), axes))(*backend.put(arrays))
    for i in range(3):
        one = [array if axis is None else np.take(array, i, axis) for array, axis in zip(arrays, axes, strict=True)]
        for actual, desired in zip(found, value_and_gradient(op, *backend.put(one)), strict=True):
            np.testing.assert_allclose(actual[i], desired, rtol=1e-5, atol=1e-6)


def test_infinities_and_nan_stay_in_their_windows():
    x = np.zeros((1, 6, 6, 20), np.float32)
    x[0, 0, 0, 3], x[0, 5, 5, 17] = np.inf, np.nan
    found = np.asarray(jaxgrad.avg_pool(x, (2, 2), (2, 2), implementation="cpu"))
    assert found[0, 0, 0, 3] == np.inf
    assert np.isnan(found[0, 2, 2, 17])
    assert np.isfinite(found).sum() == found.size - 2


@pytest.mark.parametrize("implementation", ["cpu", "xla"])
@pytest.mark.parametrize("count_include_pad", [True, False])
def test_sums_beyond_float16(implementation, count_include_pad):
    """A sum that float16 has no number for, and one that it rounds away."""
    x = np.full((1, 64, 64, 3), 50.0, np.float16)
    x[..., 1] = 1e-4
    settings = {"count_include_pad": count_include_pad, "implementation": implementation}
    y, dx = value_and_gradient(
        lambda x: jaxgrad.avg_pool(x, (64, 64), **settings), x, np.ones((1, 1, 1, 3), np.float16)
    )
    np.testing.assert_array_equal(y, x[:, :1, :1])
    np.testing.assert_array_equal(dx, np.full_like(x, 1 / 4096))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [3, 5, 7])
def test_means_of_ones(dtype, size):
    """Each mean of elements that are not padding is 1."""
    x = np.ones((1, 20, 19, 3), input_dtype(dtype))
    means = np.asarray(jaxgrad.avg_pool(x, (size, size), None, "SAME", False), np.float64)
    np.testing.assert_allclose(means, 1, rtol=3e-16)  # XLA multiplies by reciprocals


@pytest.mark.parametrize("channels", [1, 3, 8])
@pytest.mark.parametrize("shape", [(512, 512), (100003,)])
def test_long_sums(channels, shape):
    """Sums of many terms have errors of a few digits of the last place."""
    x = np.random.default_rng(0).random((1, *shape, channels), np.float32)
    y, dx = value_and_gradient(
        lambda x: jaxgrad.avg_pool(x, shape, implementation="cpu"),
        x,
        np.ones((1,) * (len(shape) + 1) + (channels,), np.float32),
    )
    np.testing.assert_allclose(np.ravel(y), np.float64(x).mean(tuple(range(len(shape) + 1))), rtol=3e-6)
    np.testing.assert_allclose(dx, np.full_like(x, 1 / np.prod(shape)), rtol=1e-6)


@pytest.mark.jax_version
def test_counts_without_64_bits():
    """Window positions beyond 2^31 - 1."""
    x = np.ones((1, 3, 2), np.float32)
    with jax.enable_x64(False):
        y = jaxgrad.avg_pool(x, (4,), (2**31,), ((1, 2**32),), count_include_pad=False)
    np.testing.assert_array_equal(y, [[[1, 1], [np.nan, np.nan], [np.nan, np.nan]]])


@pytest.mark.jax_version
def test_symbolic_shapes():
    """Of the batch and the spatial axes, on XLA."""
    shape = jax.export.symbolic_shape("n, h, w, 3", constraints=["h >= 4", "w >= 4"])
    for op in (jaxgrad.max_pool, jaxgrad.avg_pool, partial(jaxgrad.avg_pool, count_include_pad=False)):
        for padding in ("VALID", "SAME", ((1, 0), (0, 2))):

            def step(x, op=op, padding=padding):
                return value_and_gradient(
                    lambda x: op(x, (3, 2), (2, 1), padding), x, jnp.cos(op(x, (3, 2), (2, 1), padding))
                )

            exported = jax.export.export(jax.jit(step))(jax.ShapeDtypeStruct(shape, "float32"))
            x = np.random.default_rng(0).normal(size=(2, 7, 6, 3)).astype(np.float32)
            for found, expected in zip(exported.call(x), step(x), strict=True):
                np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)


def test_count_include_pad_must_be_a_bool():
    with pytest.raises(TypeError, match=r"^jaxgrad.avg_pool: count_include_pad must be a bool, got int"):
        jaxgrad.avg_pool(np.ones((2, 6, 3), np.float32), (2,), count_include_pad=1)


def test_errors_name_the_op():
    with pytest.raises(ValueError, match=r"^jaxgrad.avg_pool: each element of strides must be positive, got \(0,\)"):
        jaxgrad.avg_pool(np.ones((2, 6, 3), np.float32), (2,), (0,))
    with pytest.raises(TypeError, match=r"^jaxgrad.avg_pool: inputs must have one of the dtypes"):
        jaxgrad.avg_pool(np.ones((2, 6, 3), int), (2,))
