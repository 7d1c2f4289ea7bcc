"""Batch normalisation on plain XLA: stable statistics and a hand-written backward pass.

It runs wherever no kernel does, and `plain` is what gradients of gradients are taken of. Arithmetic is float32, float64
where x is float64; that is the dtype of every array of [C] here. Both this and the kernels keep the same residuals, so
that either backward can follow either forward.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


class Statistics(NamedTuple):
    """What a batch is normalised with: each [C].

    `mean_low` is what rounding took from `mean`. It is None where the mean is given rather than computed.
    """

    mean: jax.Array
    mean_low: jax.Array | None
    rstd: jax.Array  # 1 / sqrt(var + epsilon)


class Gradients(NamedTuple):
    """The gradients of the inputs; None where not wanted."""

    x: jax.Array | None
    scale: jax.Array | None
    bias: jax.Array | None
    residual: jax.Array | None


def compute_dtype(x: jax.Array) -> np.dtype:
    """That of the arithmetic and of the arrays of [C]."""
    return np.dtype(np.float64 if x.dtype == np.float64 else np.float32)


def _other_axes(x: jax.Array, feature_axis: int) -> tuple[int, ...]:
    return tuple(axis for axis in range(x.ndim) if axis != feature_axis)


def _spread(array: jax.Array, x: jax.Array, feature_axis: int) -> jax.Array:
    """[C] in a shape that broadcasts with x."""
    return lax.expand_dims(array, _other_axes(x, feature_axis))


def _deviation(x: jax.Array, statistics: Statistics, feature_axis: int) -> jax.Array:
    """x - mean in the compute dtype: exactly where the two are close, then less what rounding took from the mean."""
    deviation = x.astype(compute_dtype(x)) - _spread(statistics.mean, x, feature_axis)
    return deviation if statistics.mean_low is None else deviation - _spread(statistics.mean_low, x, feature_axis)


def _affine(
    deviation: jax.Array, scale: jax.Array, bias: jax.Array, statistics: Statistics, feature_axis: int
) -> jax.Array:
    slope = _spread(scale * statistics.rstd, deviation, feature_axis)
    return deviation * slope + _spread(bias, deviation, feature_axis)


def _uncontracted(mean: jax.Array) -> jax.Array:
    """`mean` to one bit less, so that it has the same value wherever it is used.

    Where XLA computes it anew for a use, its last product may be contracted with an addition there, and not rounded.
    """
    info = jnp.finfo(mean.dtype)
    return lax.reduce_precision(mean, info.nexp, info.nmant - 1)


def _two_sums(first: jax.Array, second: jax.Array, axes: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
    """Of two arrays of one shape, which XLA computes as it adds them up."""

    def apart(first: jax.Array, second: jax.Array) -> tuple[jax.Array, jax.Array]:
        return first.sum(axes), second.sum(axes)

    # On a GPU a sum is two kernels, and one reduction of both is two instead of four. On a CPU it is not vectorised.
    return lax.platform_dependent(first, second, cuda=partial(two_sums_together, axes=axes), default=apart)


def two_sums_together(first: jax.Array, second: jax.Array, axes: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
    """The two sums as one reduction, in two stages where that keeps more of a GPU busy."""

    def add(a: tuple[jax.Array, ...], b: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        return tuple(map(lax.add, a, b))

    zeros = (jnp.zeros((), first.dtype),) * 2
    parts = _parts(first.shape, axes)
    if parts > 1:
        first, second = (a.reshape(parts, -1, a.shape[-1]) for a in (first, second))
        first, second = lax.optimization_barrier(lax.reduce((first, second), zeros, add, (1,)))
        axes = (0,)
    return lax.reduce((first, second), zeros, add, axes)


def _parts(shape: tuple[Any, ...], axes: tuple[int, ...]) -> int:
    """How many parts the rows of a small array are summed in, where a row is one element of each channel.

    XLA gives one block of threads all rows of some channels up to some size. Measured on an H200: 32 parts take 9 to
    26 us forward and backward for 256 to 6272 rows in float32, one part 11 to 29. Of 25088 rows in bfloat16 they take
    68 instead of 38, for XLA then writes out what it sums.
    """
    rows = [shape[axis] for axis in axes]
    if axes != tuple(range(len(shape) - 1)) or not all(isinstance(size, int) for size in rows):
        return 1  # channels that do not come last, or sizes that are symbols
    count = math.prod(rows)
    divisors = [d for d in range(16, 65) if count % d == 0]
    return min(divisors, key=lambda d: abs(d - 32), default=1) if 0 < count <= _FEW_ROWS else 1


_FEW_ROWS = 1 << 13


def _sample(x: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    """Some dozens of elements of each channel, spread evenly over the others' axes.

    Along an axis whose size is a symbol, as in shape-polymorphic export, it is the first alone.
    """
    along_each = max(1, round(_SAMPLED ** (1 / len(axes))))
    starts, stops, strides = [0] * x.ndim, list(x.shape), [1] * x.ndim
    for axis in axes:
        size: Any = x.shape[axis]
        if isinstance(size, int):
            strides[axis] = max(1, -(-size // along_each))
            starts[axis] = (strides[axis] - 1) // 2
        else:
            stops[axis] = 1
    return lax.slice(x, starts, stops, strides)


_SAMPLED = 64


def statistics(x: jax.Array, *, feature_axis: int, epsilon: float) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """`(mean, mean_low, var, rstd)`, var biased.

    One pass over x: of the deviations from the mean of a sample of it, both sums are taken at once. What the sample's
    mean misses by, those deviations add up to; it corrects both results. The variance loses digits only where the
    sample's mean is many deviations away from the mean, as where all of the sample are outliers.
    """
    axes, dtype = _other_axes(x, feature_axis), compute_dtype(x)
    n = math.prod(x.shape[axis] for axis in axes)
    shift = _uncontracted(jnp.mean(_sample(x, axes).astype(dtype), axes))
    shift = jnp.where(jnp.isfinite(shift), shift, 0)  # infinities and NaN then go the way that plain sums give them
    deviation = x.astype(dtype) - _spread(shift, x, feature_axis)
    total, total_of_squares = _two_sums(deviation, deviation * deviation, axes)
    rest = _uncontracted(total / n)
    var = jnp.maximum(total_of_squares / n - rest * rest, 0)
    mean = shift + rest
    mean_low = jnp.where(jnp.isfinite(mean), rest - (mean - shift), 0)
    return mean, mean_low, var, lax.rsqrt(var + epsilon)


def combined(
    mean: jax.Array, mean_low: jax.Array, var: jax.Array, *, epsilon: float, over: Callable[[Any], Any]
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """The statistics of all devices' elements from those of each one's own, as many on each: `statistics`'s results.

    The means are averaged as their deviations from a mean that all agree on, which adds the variance between devices
    without cancellation (Chan, Golub and LeVeque, "Updating formulae and a pairwise algorithm", 1979).

    Args:
      mean, mean_low, var: those of one device.
      epsilon: as in `statistics`.
      over: the average over the devices of a tree of arrays.
    """
    shift = over(mean)
    shift = jnp.where(jnp.isfinite(shift), shift, 0)
    deviation = (mean - shift) + mean_low
    rest, square = over((deviation, var + deviation * deviation))
    rest = _uncontracted(rest)
    var = jnp.maximum(square - rest * rest, 0)
    mean = shift + rest
    mean_low = jnp.where(jnp.isfinite(mean), rest - (mean - shift), 0)
    return mean, mean_low, var, lax.rsqrt(var + epsilon)


def normalise(
    x: jax.Array,
    scale: jax.Array,
    bias: jax.Array,
    statistics: Statistics,
    residual: jax.Array | None,
    *,
    feature_axis: int,
    relu: bool,
) -> jax.Array:
    """act(scale * (x - mean) * rstd + bias + residual)"""
    y = _affine(_deviation(x, statistics, feature_axis), scale, bias, statistics, feature_axis)
    if residual is not None:
        y = y + residual.astype(y.dtype)
    return (jax.nn.relu(y) if relu else y).astype(x.dtype)


def passed(
    x: jax.Array,
    scale: jax.Array,
    bias: jax.Array | None,
    statistics: Statistics,
    y: jax.Array | None,
    *,
    feature_axis: int,
) -> jax.Array:
    """Where relu passed its argument on: where it is positive, computed anew unless y is given."""
    if y is not None:
        return y > 0
    assert bias is not None
    return _affine(_deviation(x, statistics, feature_axis), scale, bias, statistics, feature_axis) > 0


def through_statistics(
    x: jax.Array,
    statistics: Statistics,
    dmean: jax.Array | None,
    dvar: jax.Array | None,
    *,
    feature_axis: int,
    devices: int = 1,
) -> jax.Array:
    """dmean / n + 2 dvar (x - mean) / n: the gradient of x through its mean and variance.

    Those are of the elements of as many `devices`, of which x is one's part.
    """
    n = max(x.size // max(x.shape[feature_axis], 1), 1) * devices
    dx = jnp.zeros((), compute_dtype(x))
    if dvar is not None:
        dx = dx + _deviation(x, statistics, feature_axis) * _spread(2 * dvar / n, x, feature_axis)
    return dx if dmean is None else dx + _spread(dmean / n, x, feature_axis)


def backward(
    x: jax.Array,
    scale: jax.Array,
    bias: jax.Array | None,
    statistics: Statistics,
    y: jax.Array | None,
    dy: jax.Array | None,
    dmean: jax.Array | None,
    dvar: jax.Array | None,
    *,
    feature_axis: int,
    frozen: bool,
    relu: bool,
    wanted: tuple[bool, ...],
    sums: tuple[jax.Array, jax.Array] | None = None,
    devices: int = 1,
) -> Gradients:
    """The gradients from the residuals, only those `wanted` of (x, scale, bias, residual).

    The formula is the backward pass of Ioffe and Szegedy (2015), and what comes through the returned statistics:

      g = dy where relu passed its argument on, xhat = (x - mean) rstd
      dbias = sum g, dscale = sum g xhat
      dx = scale rstd (g - dbias / n - xhat dscale / n) + dmean / n + 2 dvar (x - mean) / n

    Where the statistics are `frozen` they do not depend on x: dx = scale rstd g. Where x is the part of one of several
    `devices`, `sums` are dbias and dscale over all of them.
    """
    dtype, axes = compute_dtype(x), _other_axes(x, feature_axis)
    g = jnp.zeros(x.shape, dtype) if dy is None else dy.astype(dtype)
    if relu:
        g = jnp.where(passed(x, scale, bias, statistics, y, feature_axis=feature_axis), g, 0)
    deviation = _deviation(x, statistics, feature_axis)
    dbias, dscale = sums or _two_sums(g, g * (deviation * _spread(statistics.rstd, x, feature_axis)), axes)
    slope = scale * statistics.rstd
    dx = g * _spread(slope, x, feature_axis)
    if not frozen:
        dvar = (0 if dvar is None else dvar) - slope * statistics.rstd * dscale / 2
        dmean = (0 if dmean is None else dmean) - slope * dbias
        dx = dx + through_statistics(x, statistics, dmean, dvar, feature_axis=feature_axis, devices=devices)
    found = Gradients(dx.astype(x.dtype), dscale, dbias, g.astype(x.dtype))
    return Gradients(*(gradient if want else None for gradient, want in zip(found, wanted, strict=True)))


def plain(
    x: jax.Array,
    scale: jax.Array,
    bias: jax.Array,
    statistics: tuple[jax.Array, jax.Array] | None,
    *,
    feature_axis: int,
    epsilon: float,
    over: Callable[[Any], Any] = lambda mean: mean,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`(y, mean, var)` in the compute dtype by the textbook's formula, with the `statistics` given or x's own.

    `over` is the average over the devices that share the batch.

    It is what gradients of gradients differentiate: every step is one that JAX has a rule for.
    """
    axes = _other_axes(x, feature_axis)
    x = x.astype(compute_dtype(x))
    if statistics is None:
        mean = over(jnp.mean(x, axes))
        var = over(jnp.mean(lax.square(x - _spread(mean, x, feature_axis)), axes))
    else:
        mean, var = (s.astype(x.dtype) for s in statistics)
    slope = scale.astype(x.dtype) * lax.rsqrt(var + epsilon)
    y = (x - _spread(mean, x, feature_axis)) * _spread(slope, x, feature_axis)
    return y + _spread(bias.astype(x.dtype), x, feature_axis), mean, var
