"""The XLA implementation of normalization: accurate statistics, and a hand-written backward pass.

`backend.py` describes the residuals and the dtypes. The functions below compute one call: their operands have no axis
of calls, which `over_calls` adds. Higher derivatives differentiate `formula`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxgrad._src.core.activations import FUNCTIONS
from jaxgrad._src.norm.backend import Gradients, Statistics, compute_dtype
from jaxgrad._src.norm.params import NormParams
from jaxgrad._src.norm.sums import two_sums


def over_calls(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function of one call as a function of arrays with a first axis of calls. Operands may be None."""

    def run(*arrays: Any) -> Any:
        if arrays[0].shape[0] != 1:
            return jax.vmap(function)(*arrays)
        results = function(*jax.tree.map(lambda array: lax.squeeze(array, (0,)), arrays))
        return jax.tree.map(lambda result: lax.expand_dims(result, (0,)), results)

    return run


def _element_axes(params: NormParams, x: jax.Array) -> tuple[int, ...]:
    """The axes of a sample without the channels."""
    return tuple(axis for axis in range(params.sample_axes, x.ndim) if axis != params.feature_axis)


def expand(params: NormParams, array: jax.Array, x: jax.Array) -> jax.Array:
    """Returns a [C] or [*samples, C] array in a shape that broadcasts with x."""
    missing = _element_axes(params, x)
    if array.ndim == 1:
        missing = (*range(params.sample_axes), *missing)
    return lax.expand_dims(array, missing)


def _per_channel(params: NormParams, statistic: jax.Array, x: jax.Array) -> jax.Array:
    """Returns [*samples, C] from [*samples, G]."""
    if params.num_groups is None:
        return statistic
    *samples, groups = statistic.shape
    channels = x.shape[params.feature_axis]
    size = channels // max(groups, 1)
    spread = jnp.broadcast_to(statistic[..., None], (*samples, groups, size))
    return spread.reshape(*samples, channels)


def _group_sums(params: NormParams, per_channel: jax.Array) -> jax.Array:
    """Returns [*samples, G], the sums over the channels of each group, from [*samples, C]."""
    if params.num_groups is None:
        return per_channel
    *samples, channels = per_channel.shape
    return per_channel.reshape(*samples, params.num_groups, channels // params.num_groups).sum(-1)


def _group_elements(params: NormParams, x: jax.Array) -> Any:
    """The number of elements that the statistics of a group are computed from."""
    count = math.prod(x.shape[axis] for axis in _element_axes(params, x))
    return count if params.num_groups is None else count * (x.shape[params.feature_axis] // params.num_groups)


def _deviation(params: NormParams, x: jax.Array, statistics: Statistics) -> jax.Array:
    """Returns x - mean in the compute dtype: an exact difference where the two are close, less `mean_low`."""
    deviation = x.astype(compute_dtype(x))
    for mean in (statistics.mean, statistics.mean_low):
        if mean is not None:
            deviation = deviation - expand(params, _per_channel(params, mean, x), x)
    return deviation


def _argument(
    params: NormParams,
    x: jax.Array,
    scale: jax.Array,
    bias: jax.Array,
    statistics: Statistics,
    residual: jax.Array | None,
) -> jax.Array:
    """Returns the argument of the activation, in the compute dtype."""
    z = _times_slope(params, _deviation(params, x, statistics), scale, statistics.rstd) + expand(params, bias, x)
    return z if residual is None else z + residual.astype(z.dtype)


def _times_slope(params: NormParams, array: jax.Array, scale: jax.Array, rstd: jax.Array) -> jax.Array:
    """Returns array * rstd * scale."""
    if _element_axes(params, array):
        return array * expand(params, _slope(params, array, scale, rstd), array)
    normalized = array * expand(params, _per_channel(params, rstd, array), array)
    return normalized * expand(params, scale, array)  # the slope of rows is as large as the array


def _slope(params: NormParams, x: jax.Array, scale: jax.Array, rstd: jax.Array) -> jax.Array:
    """Returns scale * rstd, [*samples, C]."""
    return lax.expand_dims(scale, range(params.sample_axes)) * _per_channel(params, rstd, x)


def activate(params: NormParams, z: jax.Array) -> jax.Array:
    """Returns act(z)."""
    return z if params.activation is None else FUNCTIONS[params.activation](z)


def _rounded(mean: jax.Array) -> jax.Array:
    """Returns `mean` rounded to one bit less, so that it has the same value in all its uses.

    Where XLA computes `mean` again for a use, it may contract the last product and an addition into one fused
    multiply-add, which does not round the product.
    """
    info = jnp.finfo(mean.dtype)
    return lax.reduce_precision(mean, info.nexp, info.nmant - 1)


def _sample(params: NormParams, x: jax.Array) -> jax.Array:
    """Returns the mean of about 64 elements of each group or, without groups, of each channel, in the compute dtype.

    The elements are evenly spaced. Along an axis of symbolic size, as in shape-polymorphic export, only the first index
    is taken.
    """
    axes = list(_element_axes(params, x))
    if not axes:  # rows: a slice of them takes as long as the sum
        return _group_sums(params, x.astype(compute_dtype(x))) / _group_elements(params, x)
    if params.num_groups is not None:  # the channels of a group become an axis after that of the groups
        at = params.feature_axis
        group_size = x.shape[at] // params.num_groups
        x = x.reshape(*x.shape[:at], params.num_groups, group_size, *x.shape[at + 1 :])
        axes = [*(axis + (axis > at) for axis in axes), at + 1]
    along_each = max(1, round(_SAMPLE_SIZE ** (1 / max(len(axes), 1))))
    starts, stops, strides = [0] * x.ndim, list(x.shape), [1] * x.ndim
    size: Any
    for axis in axes:
        size = x.shape[axis]
        if isinstance(size, int):
            strides[axis] = max(1, -(-size // along_each))
            starts[axis] = (strides[axis] - 1) // 2
        else:
            stops[axis] = 1
    return jnp.mean(lax.slice(x, starts, stops, strides).astype(compute_dtype(x)), tuple(axes))


_SAMPLE_SIZE = 64


def statistics(params: NormParams, x: jax.Array) -> tuple[jax.Array | None, jax.Array | None, jax.Array, jax.Array]:
    """Returns `(mean, mean_low, var, rstd)`, with the biased variance.

    One pass over x sums the deviations from the mean of a sample, and their squares. The sum of the deviations corrects
    the mean and the variance. The variance loses digits only where the sample's mean is many standard deviations away
    from the mean, for instance if all elements of the sample are outliers.
    """
    axes, dtype, n = _element_axes(params, x), compute_dtype(x), _group_elements(params, x)
    if not params.centered:
        var = _group_sums(params, lax.square(x.astype(dtype)).sum(axes)) / n
        return None, None, var, lax.rsqrt(var + params.epsilon)
    shift = _rounded(_sample(params, x))
    shift = jnp.where(jnp.isfinite(shift), shift, 0)  # infinities and NaN then propagate as in plain sums
    deviation = x.astype(dtype) - expand(params, _per_channel(params, shift, x), x)
    total, total_of_squares = two_sums(deviation, deviation * deviation, axes)
    rest = _rounded(_group_sums(params, total) / n)
    var = _variance(_group_sums(params, total_of_squares) / n, rest)
    mean = shift + rest
    mean_low = jnp.where(jnp.isfinite(mean), rest - (mean - shift), 0)
    return mean, mean_low, var, lax.rsqrt(var + params.epsilon)


def _variance(mean_of_squares: jax.Array, mean: jax.Array) -> jax.Array:
    """Infinite where the mean is finite and the mean of the squares is not: there, both terms may be infinite."""
    too_large = jnp.isfinite(mean) & jnp.isinf(mean_of_squares)
    return jnp.where(too_large, jnp.inf, jnp.maximum(mean_of_squares - mean * mean, 0))


def combine_statistics(
    params: NormParams, mean: Any, mean_low: Any, var: jax.Array, *, pmean: Callable[[Any], Any]
) -> tuple[jax.Array | None, jax.Array | None, jax.Array, jax.Array]:
    """Returns the statistics of the elements of all devices, as `statistics` does, with or without an axis of calls.

    Averages the deviations of the means from a mean that is the same on all devices, which adds the variance between
    the devices without cancellation (Chan, Golub and LeVeque, "Updating formulae and a pairwise algorithm", 1979).

    Args:
      params: the static arguments.
      mean, mean_low, var: the statistics of one device, where all devices have equally many elements.
      pmean: returns the averages over the devices of a tree of arrays.
    """
    if not params.centered:
        var = pmean(var)
        return None, None, var, lax.rsqrt(var + params.epsilon)
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
    params: NormParams,
    x: jax.Array,
    scale: jax.Array,
    bias: jax.Array,
    statistics: Statistics,
    residual: jax.Array | None,
) -> jax.Array:
    """Returns act(scale * (x - mean) * rstd + bias + residual)."""
    return activate(params, _argument(params, x, scale, bias, statistics, residual)).astype(x.dtype)


def forward(
    params: NormParams, x: jax.Array, scale: jax.Array, bias: jax.Array, residual: jax.Array | None
) -> tuple[Any, ...]:
    """Returns `(y, mean, mean_low, var, rstd)`."""
    mean, mean_low, var, rstd = statistics(params, x)
    y = normalize(params, x, scale, bias, Statistics(mean, mean_low, rstd), residual)
    return y, mean, mean_low, var, rstd


def relu_mask(
    params: NormParams, x: jax.Array, scale: jax.Array, bias: Any, statistics: Statistics, y: jax.Array | None
) -> jax.Array:
    """Returns where the argument of relu is positive, from y or, if y is None, computed again from the inputs."""
    return (_argument(params, x, scale, bias, statistics, None) if y is None else y) > 0


def through_activation(
    params: NormParams,
    x: jax.Array,
    scale: jax.Array,
    bias: Any,
    statistics: Statistics,
    y: jax.Array | None,
    residual: jax.Array | None,
    dy: jax.Array,
) -> jax.Array:
    """Returns dy times the derivative of the activation, in the compute dtype. `dy` may be a tangent too."""
    dy = dy.astype(compute_dtype(x))
    if params.activation is None:
        return dy
    if params.activation == "relu":
        return jnp.where(relu_mask(params, x, scale, bias, statistics, y), dy, 0)
    return jax.jvp(partial(activate, params), (_argument(params, x, scale, bias, statistics, residual),), (dy,))[1]


def gradient_through_statistics(
    params: NormParams,
    x: jax.Array,
    statistics: Statistics,
    dmean: jax.Array | None,
    dvar: jax.Array | None,
    *,
    num_devices: int = 1,
) -> jax.Array:
    """Returns dmean / n + 2 dvar (x - mean) / n, the gradient of x through its mean and variance.

    n is the number of elements of each group on all devices; x is the shard of one device.
    """
    n = max(_group_elements(params, x), 1) * num_devices
    dx = jnp.zeros((), compute_dtype(x))
    if dvar is not None:
        dx = dx + _deviation(params, x, statistics) * expand(params, _per_channel(params, 2 * dvar / n, x), x)
    return dx if dmean is None else dx + expand(params, _per_channel(params, dmean / n, x), x)


def channel_sums(params: NormParams, x: jax.Array, statistics: Statistics, g: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the sums of g and of g xhat over the elements of each channel of a sample, [*samples, C]."""
    rstd = expand(params, _per_channel(params, statistics.rstd, x), x)
    return two_sums(g, g * (_deviation(params, x, statistics) * rstd), _element_axes(params, x))


def backward(
    params: NormParams,
    x: jax.Array,
    scale: jax.Array,
    bias: jax.Array | None,
    statistics: Statistics,
    y: jax.Array | None,
    residual: jax.Array | None,
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
    xhat = (x - mean) rstd, g the gradient of the argument of the activation, and a and b the sums of g scale and of
    g scale xhat over the n elements of a group:

      dbias = sum g, dscale = sum g xhat
      dx = rstd (g scale - a / n - xhat b / n) + dmean / n + 2 dvar (x - mean) / n

    Statistics that are not centered have no mean, and no term with a. Frozen statistics do not depend on x:
    dx = scale rstd g. If x is the shard of one of several devices, `sums` are the `channel_sums` of all devices.
    """
    dtype = compute_dtype(x)
    g = jnp.zeros(x.shape, dtype)
    if dy is not None:
        g = through_activation(params, x, scale, bias, statistics, y, residual, dy)
    sums = sums or channel_sums(params, x, statistics, g)
    dx = _times_slope(params, g, scale, statistics.rstd)
    if not params.frozen:
        a_rstd, b_rstd2 = _scaled_group_sums(params, x, scale, statistics, g, sums)
        dvar = (0 if dvar is None else dvar) - b_rstd2 / 2
        if params.centered:
            dmean = (0 if dmean is None else dmean) - a_rstd
        dx = dx + gradient_through_statistics(params, x, statistics, dmean, dvar, num_devices=num_devices)
    axes = tuple(range(params.sample_axes))
    dbias, dscale = (each.sum(axes) if axes else each for each in sums)
    found = Gradients(dx.astype(x.dtype), dscale, dbias, g.astype(x.dtype))
    return Gradients(*(gradient if needed else None for gradient, needed in zip(found, needs_grad, strict=True)))


def _scaled_group_sums(
    params: NormParams,
    x: jax.Array,
    scale: jax.Array,
    statistics: Statistics,
    g: jax.Array,
    sums: tuple[jax.Array, jax.Array],
) -> tuple[jax.Array, jax.Array]:
    """Returns a rstd and b rstd^2 of `backward`, from the `channel_sums`."""
    rstd = statistics.rstd
    if _element_axes(params, x):
        slope = _slope(params, x, scale, rstd)
        return _group_sums(params, slope * sums[0]), _group_sums(
            params, slope * _per_channel(params, rstd, x) * sums[1]
        )
    # The sums of channels are as large as x. Without them, XLA has no reason to write them to memory.
    weighted = g * expand(params, scale, x)
    xhat = _deviation(params, x, statistics) * expand(params, _per_channel(params, rstd, x), x)
    return _group_sums(params, weighted) * rstd, _group_sums(params, weighted * xhat) * rstd * rstd


def formula(
    params: NormParams,
    x: jax.Array,
    scale: jax.Array,
    bias: jax.Array,
    given: tuple[jax.Array, jax.Array] | None = None,
) -> tuple[jax.Array, Any, jax.Array]:
    """Returns `(z, mean, var)` in the compute dtype by the textbook formula, without residual and activation.

    JAX can differentiate every step to any order.

    Args:
      params: the static arguments.
      x, scale, bias: the operands.
      given: the mean and the variance; None for the statistics of x.
    """
    x = x.astype(compute_dtype(x))
    mean: jax.Array | None = None
    if given is not None:
        mean, var = (s.astype(x.dtype) for s in given)
        deviation = x - expand(params, mean, x)
    else:
        deviation = x
        if params.centered:
            mean = params.pmean(_group_means(params, x))
            deviation = x - expand(params, _per_channel(params, mean, x), x)
        var = params.pmean(_group_means(params, lax.square(deviation)))
    z = _times_slope(params, deviation, scale.astype(x.dtype), lax.rsqrt(var + params.epsilon))
    return z + expand(params, bias.astype(x.dtype), x), mean, var


def _group_means(params: NormParams, x: jax.Array) -> jax.Array:
    return _group_sums(params, x.sum(_element_axes(params, x))) / _group_elements(params, x)
