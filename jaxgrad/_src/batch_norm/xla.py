"""The XLA implementation of batch normalization: accurate statistics, and a hand-written backward pass.

`backend.py` describes the residuals and the dtypes. Higher derivatives differentiate `formula`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxgrad._src.batch_norm.backend import Gradients, Statistics, compute_dtype
from jaxgrad._src.batch_norm.params import BatchNormParams


def _other_axes(x: jax.Array, feature_axis: int) -> tuple[int, ...]:
    return tuple(axis for axis in range(x.ndim) if axis != feature_axis)


def _expand(array: jax.Array, x: jax.Array, feature_axis: int) -> jax.Array:
    """Returns a [C] array in a shape that broadcasts with x."""
    return lax.expand_dims(array, _other_axes(x, feature_axis))


def _deviation(x: jax.Array, statistics: Statistics, feature_axis: int) -> jax.Array:
    """Returns x - mean in the compute dtype: an exact difference where the two are close, less `mean_low`."""
    deviation = x.astype(compute_dtype(x)) - _expand(statistics.mean, x, feature_axis)
    return deviation if statistics.mean_low is None else deviation - _expand(statistics.mean_low, x, feature_axis)


def _affine(
    deviation: jax.Array, scale: jax.Array, bias: jax.Array, statistics: Statistics, feature_axis: int
) -> jax.Array:
    slope = _expand(scale * statistics.rstd, deviation, feature_axis)
    return deviation * slope + _expand(bias, deviation, feature_axis)


def _rounded(mean: jax.Array) -> jax.Array:
    """Returns `mean` rounded to one bit less, so that it has the same value in all its uses.

    Where XLA computes `mean` again for a use, it may contract the last product and an addition into one fused
    multiply-add, which does not round the product.
    """
    info = jnp.finfo(mean.dtype)
    return lax.reduce_precision(mean, info.nexp, info.nmant - 1)


def _two_sums(first: jax.Array, second: jax.Array, axes: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
    """Returns the sums of two arrays of one shape, which XLA computes inside the reduction."""

    def separately(first: jax.Array, second: jax.Array) -> tuple[jax.Array, jax.Array]:
        return first.sum(axes), second.sum(axes)

    # On a GPU a reduction launches two kernels: one reduction of both arrays launches two instead of four. On a CPU XLA
    # does not vectorize a reduction of two arrays.
    return lax.platform_dependent(first, second, cuda=partial(two_sums_together, axes=axes), default=separately)


def two_sums_together(first: jax.Array, second: jax.Array, axes: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
    """Returns both sums by one reduction, in two stages where that occupies more of a GPU."""

    def add(a: tuple[jax.Array, ...], b: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        return tuple(map(lax.add, a, b))

    zeros = (jnp.zeros((), first.dtype),) * 2
    parts = _parts(first.shape, axes)
    if parts > 1:
        first, second = (a.reshape(parts, math.prod(a.shape[:-1]) // parts, a.shape[-1]) for a in (first, second))
        first, second = lax.optimization_barrier(lax.reduce((first, second), zeros, add, (1,)))
        axes = (0,)
    return lax.reduce((first, second), zeros, add, axes)


def _parts(shape: tuple[Any, ...], axes: tuple[int, ...]) -> int:
    """Returns the number of parts in which the rows of a small array are summed. A row is one element of each channel.

    For small arrays XLA assigns all rows of a group of channels to one thread block, and parts are faster on a GPU. For
    many rows they are slower, because XLA then writes the terms of the sums to memory.
    """
    rows = [shape[axis] for axis in axes]
    if axes != tuple(range(len(shape) - 1)) or not all(isinstance(size, int) for size in rows):
        return 1  # the channels are not the last dimension, or sizes are symbolic
    count = math.prod(rows)
    divisors = [d for d in range(16, 65) if count % d == 0]
    return min(divisors, key=lambda d: abs(d - 32), default=1) if 0 < count <= _MAX_ROWS_IN_PARTS else 1


_MAX_ROWS_IN_PARTS = 1 << 13


def _sample(x: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    """Returns up to about 64 elements of each channel, evenly spaced over the other axes.

    Along an axis of symbolic size, as in shape-polymorphic export, only the first index.
    """
    along_each = max(1, round(_SAMPLE_SIZE ** (1 / len(axes))))
    starts, stops, strides = [0] * x.ndim, list(x.shape), [1] * x.ndim
    for axis in axes:
        size: Any = x.shape[axis]
        if isinstance(size, int):
            strides[axis] = max(1, -(-size // along_each))
            starts[axis] = (strides[axis] - 1) // 2
        else:
            stops[axis] = 1
    return lax.slice(x, starts, stops, strides)


_SAMPLE_SIZE = 64


def statistics(params: BatchNormParams, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Returns `(mean, mean_low, var, rstd)`, with the biased variance.

    One pass over x sums the deviations from the mean of a sample, and their squares. The sum of the deviations corrects
    the mean and the variance. The variance loses digits only where the sample's mean is many standard deviations away
    from the mean, for instance if all elements of the sample are outliers.
    """
    feature_axis = params.feature_axis
    axes, dtype = _other_axes(x, feature_axis), compute_dtype(x)
    n = math.prod(x.shape[axis] for axis in axes)
    shift = _rounded(jnp.mean(_sample(x, axes).astype(dtype), axes))
    shift = jnp.where(jnp.isfinite(shift), shift, 0)  # infinities and NaN then propagate as in plain sums
    deviation = x.astype(dtype) - _expand(shift, x, feature_axis)
    total, total_of_squares = _two_sums(deviation, deviation * deviation, axes)
    rest = _rounded(total / n)
    var = _variance(total_of_squares / n, rest)
    mean = shift + rest
    mean_low = jnp.where(jnp.isfinite(mean), rest - (mean - shift), 0)
    return mean, mean_low, var, lax.rsqrt(var + params.epsilon)


def _variance(mean_of_squares: jax.Array, mean: jax.Array) -> jax.Array:
    """Infinite where the mean is finite and the mean of the squares is not: there, both terms may be infinite."""
    too_large = jnp.isfinite(mean) & jnp.isinf(mean_of_squares)
    return jnp.where(too_large, jnp.inf, jnp.maximum(mean_of_squares - mean * mean, 0))


def combine_statistics(
    params: BatchNormParams, mean: jax.Array, mean_low: jax.Array, var: jax.Array, *, pmean: Callable[[Any], Any]
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Returns the statistics of the elements of all devices, as `statistics` does.

    Averages the deviations of the means from a mean that is the same on all devices, which adds the variance between
    the devices without cancellation (Chan, Golub and LeVeque, "Updating formulae and a pairwise algorithm", 1979).

    Args:
      params: the static arguments.
      mean, mean_low, var: the statistics of one device, where all devices have equally many elements.
      pmean: returns the averages over the devices of a tree of arrays.
    """
    shift = pmean(mean)
    shift = jnp.where(jnp.isfinite(shift), shift, 0)
    deviation = (mean - shift) + mean_low
    rest, square = pmean((deviation, var + deviation * deviation))
    rest = _rounded(rest)
    var = _variance(square, rest)
    mean = shift + rest
    mean_low = jnp.where(jnp.isfinite(mean), rest - (mean - shift), 0)
    return mean, mean_low, var, lax.rsqrt(var + params.epsilon)


def normalize(
    params: BatchNormParams,
    x: jax.Array,
    scale: jax.Array,
    bias: jax.Array,
    statistics: Statistics,
    residual: jax.Array | None,
) -> jax.Array:
    """Returns act(scale * (x - mean) * rstd + bias + residual)."""
    feature_axis = params.feature_axis
    y = _affine(_deviation(x, statistics, feature_axis), scale, bias, statistics, feature_axis)
    if residual is not None:
        y = y + residual.astype(y.dtype)
    return (jax.nn.relu(y) if params.relu else y).astype(x.dtype)


def forward(
    params: BatchNormParams, x: jax.Array, scale: jax.Array, bias: jax.Array, residual: jax.Array | None
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array]:
    """Returns `(y, mean, mean_low, var, rstd)`."""
    mean, mean_low, var, rstd = statistics(params, x)
    y = normalize(params, x, scale, bias, Statistics(mean, mean_low, rstd), residual)
    return y, mean, mean_low, var, rstd


def relu_mask(
    params: BatchNormParams,
    x: jax.Array,
    scale: jax.Array,
    bias: jax.Array | None,
    statistics: Statistics,
    y: jax.Array | None,
) -> jax.Array:
    """Returns where the argument of relu is positive, from y or, if y is None, computed again from the inputs."""
    if y is not None:
        return y > 0
    assert bias is not None
    feature_axis = params.feature_axis
    return _affine(_deviation(x, statistics, feature_axis), scale, bias, statistics, feature_axis) > 0


def gradient_through_statistics(
    params: BatchNormParams,
    x: jax.Array,
    statistics: Statistics,
    dmean: jax.Array | None,
    dvar: jax.Array | None,
    *,
    num_devices: int = 1,
) -> jax.Array:
    """Returns dmean / n + 2 dvar (x - mean) / n, the gradient of x through its mean and variance.

    n is the number of elements of each channel on all devices; x is the shard of one device.
    """
    feature_axis = params.feature_axis
    n = max(x.size // max(x.shape[feature_axis], 1), 1) * num_devices
    dx = jnp.zeros((), compute_dtype(x))
    if dvar is not None:
        dx = dx + _deviation(x, statistics, feature_axis) * _expand(2 * dvar / n, x, feature_axis)
    return dx if dmean is None else dx + _expand(dmean / n, x, feature_axis)


def backward(
    params: BatchNormParams,
    x: jax.Array,
    scale: jax.Array,
    bias: jax.Array | None,
    statistics: Statistics,
    y: jax.Array | None,
    dy: jax.Array | None,
    dmean: jax.Array | None,
    dvar: jax.Array | None,
    *,
    needs_grad: tuple[bool, ...],
    sums: tuple[jax.Array, jax.Array] | None = None,
    num_devices: int = 1,
) -> Gradients:
    """Returns the gradients that are needed of (x, scale, bias, residual).

    The formula is the backward pass of Ioffe and Szegedy (2015), extended by the cotangents of the statistics. With
    xhat = (x - mean) rstd, and g = dy where the argument of relu is positive, otherwise 0:

      dbias = sum g, dscale = sum g xhat
      dx = scale rstd (g - dbias / n - xhat dscale / n) + dmean / n + 2 dvar (x - mean) / n

    Frozen statistics do not depend on x: dx = scale rstd g. If x is the shard of one of several devices, `sums` are
    dbias and dscale of all devices.
    """
    feature_axis = params.feature_axis
    dtype, axes = compute_dtype(x), _other_axes(x, feature_axis)
    g = jnp.zeros(x.shape, dtype) if dy is None else dy.astype(dtype)
    if params.relu:
        g = jnp.where(relu_mask(params, x, scale, bias, statistics, y), g, 0)
    deviation = _deviation(x, statistics, feature_axis)
    dbias, dscale = sums or _two_sums(g, g * (deviation * _expand(statistics.rstd, x, feature_axis)), axes)
    slope = scale * statistics.rstd
    dx = g * _expand(slope, x, feature_axis)
    if not params.frozen:
        dvar = (0 if dvar is None else dvar) - slope * statistics.rstd * dscale / 2
        dmean = (0 if dmean is None else dmean) - slope * dbias
        dx = dx + gradient_through_statistics(params, x, statistics, dmean, dvar, num_devices=num_devices)
    found = Gradients(dx.astype(x.dtype), dscale, dbias, g.astype(x.dtype))
    return Gradients(*(gradient if needed else None for gradient, needed in zip(found, needs_grad, strict=True)))


def formula(
    params: BatchNormParams,
    x: jax.Array,
    scale: jax.Array,
    bias: jax.Array,
    given: tuple[jax.Array, jax.Array] | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns `(y, mean, var)` in the compute dtype by the textbook formula, without residual and activation.

    JAX can differentiate every step to any order.

    Args:
      params: the static arguments.
      x, scale, bias: the operands.
      given: the mean and the variance; None for the statistics of the batch.
    """
    feature_axis = params.feature_axis
    axes = _other_axes(x, feature_axis)
    x = x.astype(compute_dtype(x))
    if given is None:
        mean = params.pmean(jnp.mean(x, axes))
        var = params.pmean(jnp.mean(lax.square(x - _expand(mean, x, feature_axis)), axes))
    else:
        mean, var = (s.astype(x.dtype) for s in given)
    slope = scale.astype(x.dtype) * lax.rsqrt(var + params.epsilon)
    y = (x - _expand(mean, x, feature_axis)) * _expand(slope, x, feature_axis)
    return y + _expand(bias.astype(x.dtype), x, feature_axis), mean, var
