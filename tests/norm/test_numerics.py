"""Numerical edge cases of batch normalization: large means, infinities, NaN, and empty arrays."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from backends import BATCH_NORM, CUDNN
from batch_norm_references import (
    Case,
    inference,
    make_inputs,
    plain_inference,
    plain_training,
    reference,
    training,
    values_and_gradients,
)

from jaxgrad._src.norm import sums

BACKENDS = BATCH_NORM
LAYOUTS = [((25, 30, 40, 6), -1), ((20, 6, 30, 50), 1), ((2000, 130), -1), ((2, 5, 20000), 1)]


def _largest(a, b):
    return np.max(np.abs(np.asarray(a, np.float64) - b))


def _lost_with_the_mean(backend, mean, deviation, eps, roundings=4):
    """Relative error of the deviations when the mean is rounded to one number.

    cuDNN keeps no low-order part of the mean: each deviation has an error of half an eps of the mean, sums a few eps.
    """
    return roundings * eps * abs(mean) / deviation if backend == CUDNN else 0.0


@pytest.mark.parametrize(("shape", "axis"), LAYOUTS, ids=str)
@pytest.mark.parametrize(("mean", "deviation"), [(1e4, 1e-2), (-3e5, 1.0), (1e3, 1e3), (0, 1e-6)])
def test_variance_keeps_its_digits_with_a_large_mean(backend, shape, axis, mean, deviation):
    """float32 with a mean of up to a million deviations, where E[x^2] - E[x]^2 would lose every digit."""
    rng = np.random.default_rng(3)
    x = (mean + deviation * rng.standard_normal(shape)).astype(np.float32)
    C, dy = shape[axis], rng.standard_normal(shape).astype(np.float32)
    scale, bias = np.linspace(0.5, 2, C, dtype=np.float32), np.linspace(-1, 1, C, dtype=np.float32)
    settings = {"feature_axis": axis, "epsilon": 1e-12}
    arrays = ((x, scale, bias), (dy, None, None))
    results, (dx, dscale, dbias) = values_and_gradients(partial(training(backend), **settings), *backend.put(arrays))
    expected, (ex, escale, ebias) = reference(partial(plain_training, **settings), *arrays)
    lost = _lost_with_the_mean(backend, mean, deviation, 2.0**-23)
    mean_eps = 1e-7 if lost == 0 else 2.0**-22
    assert _largest(results.mean, expected.mean) <= mean_eps * abs(mean) + 1e-6 * deviation
    np.testing.assert_allclose(results.var, expected.var, rtol=2e-6 + lost**2)
    # Rounding x changes y by up to eps / 2 of the mean; the tolerance covers the other errors.
    assert _largest(results.y, expected.y) <= 1e-5 + 2 * lost
    assert _largest(dx, ex) <= (1e-5 + lost) * np.abs(ex).max()
    terms = dy.size // C
    assert _largest(dscale, escale) <= 2e-6 * terms**0.5 + (2e-6 + lost) * np.abs(escale).max()
    assert _largest(dbias, ebias) <= 2e-6 * terms**0.5 + 2e-6 * np.abs(ebias).max()


@pytest.mark.parametrize("axis", [0, 1])
def test_variance_keeps_its_digits_in_float64(backend, axis):
    """Values n + k / 4, whose mean and variance are known exactly."""
    steps = np.tile(np.arange(-40, 41), 25)
    x = (2.0**40 + steps / 4)[:, None]
    _, mean, var = training(backend)(
        *backend.put((x if axis else x.T.copy(), np.ones(1), np.zeros(1))), feature_axis=axis
    )
    expected = np.mean((steps / 4) ** 2)
    # In float64 cuDNN updates a running mean row by row, with a rounding in each step.
    lost = _lost_with_the_mean(backend, 2.0**40, expected**0.5, 2.0**-52, roundings=32)
    np.testing.assert_allclose(mean, 2.0**40, rtol=0 if lost == 0 else 2.0**-51)
    np.testing.assert_allclose(var, expected, rtol=1e-14 + lost**2)


def test_sorted_values(backend):
    """The mean of each block is far from the mean of the batch."""
    x = np.sort(np.random.default_rng(0).standard_normal((50000, 2)).astype(np.float32), axis=0) * 100 + 1e4
    results = training(backend)(*backend.put((x, np.ones(2, np.float32), np.zeros(2, np.float32))))
    wide = x.astype(np.float64)
    np.testing.assert_allclose(results.var, wide.var(0), rtol=2e-6)
    np.testing.assert_allclose(results.mean, wide.mean(0), rtol=2e-7)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf], ids=str)
@pytest.mark.parametrize(("shape", "axis"), [((40, 7), 1), ((3, 7, 50), 1)], ids=str)
@pytest.mark.parametrize(
    ("activation", "where"), [(None, "x"), (None, "scale"), ("relu", "x"), ("relu", "dy"), ("relu", "bias")]
)
def test_nonfinite_values_stay_in_their_channel_and_match_jax(backend, value, shape, axis, activation, where):
    case = Case(shape, axis, activation=activation, dtypes=("float64",) * 3)
    (x, scale, bias, _), (dy, dmean, dvar) = make_inputs(case)
    np.moveaxis(x if where == "x" else dy, axis, 0)[2].flat[4] = value if where in ("x", "dy") else 1.0
    if where in ("scale", "bias"):
        {"scale": scale, "bias": bias}[where][2] = value
    arrays = ((x, scale, bias), (dy, dmean, dvar))
    found = values_and_gradients(partial(training(backend), **case.settings), *backend.put(arrays))
    expected = reference(partial(plain_training, **case.settings), *arrays)
    # The running mean of cuDNN is NaN for a channel with an infinity.
    _assert_results_match(found, expected, infinities=backend != CUDNN)


def _assert_results_match(found, expected, *, infinities=True):
    """Compares values, including the signs of infinities, and gradients where they are finite.

    Whether a gradient is infinity or NaN depends on the order of its sums. Without `infinities`, so do the values.
    """

    def finite(array):
        return np.where(np.isfinite(array), array, np.nan)

    def check(a, b, infinities):
        a, b = (a, b) if infinities else (finite(a), finite(b))
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-9)

    jax.tree.map(lambda a, b: check(a, b, infinities), found[0], expected[0])
    jax.tree.map(lambda a, b: check(a, b, False), tuple(found[1]), tuple(expected[1]))


@pytest.mark.parametrize("value", [1e30, -1e38, 3e38])
def test_a_variance_larger_than_float32_is_infinite(backend, value):
    """Its channel is then zero before scale and bias, as with `jax.numpy`, and all results are finite."""
    if backend == CUDNN:
        pytest.skip("the kernels of cuDNN have sums of their own")
    (x, scale, bias, _), (dy, *_) = make_inputs(Case((40, 7), 1))
    x[3, 2] = value
    arrays = ((x, scale, bias), (dy, None, None))
    (y, _, var), gradients = values_and_gradients(training(backend), *backend.put(arrays))
    assert np.isposinf(var[2])
    assert np.isfinite(np.delete(var, 2)).all()
    np.testing.assert_allclose(y[:, 2], bias[2], rtol=1e-6)
    for array in (y, *gradients):
        assert np.isfinite(array).all()


@pytest.mark.parametrize("value", [np.nan, np.inf], ids=str)
@pytest.mark.parametrize("where", range(5))
def test_nonfinite_values_with_frozen_statistics(backend, value, where):
    (x, scale, bias, _), (dy, *_) = make_inputs(Case((40, 7), dtypes=("float64",) * 3))
    inputs = (x, scale, bias, bias + 0.3, scale**2 + 0.1)
    inputs[where][..., 2].flat[0] = value
    found = values_and_gradients(inference(backend), *backend.put((inputs, (dy,))))
    expected = reference(partial(plain_inference, feature_axis=-1), inputs, (dy,))
    if where == 4:  # the gradient of 1 / sqrt(infinity) is NaN in JAX; its limit is zero
        found, expected = ((y, gradients[:4]) for y, gradients in (found, expected))
    _assert_results_match(found, expected)


@pytest.mark.parametrize("opposite", [False, True])
def test_several_infinities_in_one_channel(backend, opposite):
    x = np.random.default_rng(0).standard_normal((300, 4))
    x[7, 1], x[200, 1] = np.inf, -np.inf if opposite else np.inf
    _, mean, var = training(backend)(*backend.put((x, np.ones(4), np.zeros(4))))
    with np.errstate(invalid="ignore"):
        expected = x.mean(0)
    if backend == CUDNN:  # the running mean of cuDNN is NaN for a channel with an infinity
        expected[1] = np.nan
    np.testing.assert_allclose(mean, expected)
    assert np.isnan(var[1])
    assert np.isfinite(np.delete(np.asarray(var), 1)).all()


@pytest.mark.parametrize(("shape", "axis"), [((0, 3), 1), ((4, 0), 1), ((2, 3, 0), 1), ((0, 5, 4), 2), ((2, 0, 3), 0)])
@pytest.mark.parametrize(("activation", "residual"), [(None, False), ("relu", False), ("relu", True)])
def test_empty_arrays(backend, shape, axis, activation, residual):
    case = Case(shape, axis, residual, activation, dtypes=("float64",) * 3)
    inputs, cotangents = make_inputs(case)

    def ours(x, scale, bias, residual):
        return training(backend)(x, scale, bias, residual=residual, **case.settings)

    found = values_and_gradients(ours, *backend.put((inputs, cotangents)))
    expected = reference(partial(plain_training, **case.settings), inputs, cotangents)
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    frozen = (*inputs[:3], *cotangents[1:])
    found = values_and_gradients(partial(inference(backend), feature_axis=axis), *backend.put((frozen, cotangents[:1])))
    assert jax.tree.map(np.shape, found) == (shape, (shape, *[(case.C,)] * 4))
    jax.tree.map(lambda g: np.testing.assert_array_equal(g, 0), found[1])


def test_one_element_per_channel(backend):
    """The variance is zero and y is the bias: the gradient of x is zero."""
    x, scale, bias = jnp.array([[3.0, -2.0]]), jnp.array([1.5, 2.0]), jnp.array([0.1, 0.2])
    results, (dx, dscale, dbias) = values_and_gradients(
        training(backend), *backend.put(((x, scale, bias), (jnp.ones((1, 2)), None, None)))
    )
    np.testing.assert_array_equal(results.y[0], bias)
    np.testing.assert_array_equal(results.mean, x[0])
    np.testing.assert_array_equal(results.var, 0)
    np.testing.assert_allclose(dx, 0, atol=1e-10)
    np.testing.assert_array_equal(dscale, 0)
    np.testing.assert_array_equal(dbias, 1)


@pytest.mark.parametrize(
    ("shape", "axes", "parts"),
    [
        ((8, 14, 14, 5), (0, 1, 2), 32),
        ((28 * 14, 3), (0,), 28),
        ((67, 2), (0,), 1),
        ((9216, 2), (0,), 1),
        ((0, 3), (0,), 1),
        ((64, 3, 5), (0, 2), 1),
    ],
    ids=str,
)
def test_two_sums_match_the_gpu_reduction(shape, axes, parts):
    first, second = np.random.default_rng(0).standard_normal((2, *shape)).astype(np.float32)
    assert sums._parts(shape, axes) == parts
    found = jax.jit(partial(sums.two_sums_together, axes=axes))(first, second)
    for actual, array in zip(found, (first, second), strict=True):
        np.testing.assert_allclose(actual, array.sum(axes, dtype=np.float64), rtol=0, atol=1e-3)
