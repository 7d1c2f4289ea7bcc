"""The convolution triangle on plain XLA, with a weight gradient of grouped convolutions that XLA does not make slow.

XLA writes the weight gradient of a grouped convolution as one with `batch_group_count`, for which its CPU backend has
no fast code. There it is a product for each tap of the window: the elements of x that the tap meets, times dy, group by
group.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxgrad._conv_geometry import Geometry, shape_of
from jaxgrad._partitioning import vary_alike

_MOST_TAPS_UNROLLED = 64


def forward(
    geometry: Geometry, precision: Any, relu: bool, x: jax.Array, w: jax.Array, bias: jax.Array | None
) -> jax.Array:
    return finish(_convolve(geometry, precision, x, w), bias, relu, geometry.out_spec)


def _convolve(geometry: Geometry, precision: Any, x: jax.Array, w: jax.Array) -> jax.Array:
    return lax.conv_general_dilated(
        x,
        w,
        geometry.window_strides,
        geometry.padding,
        rhs_dilation=geometry.rhs_dilation,
        dimension_numbers=geometry.dimension_numbers,
        feature_group_count=geometry.feature_group_count,
        precision=precision,
    )


def finish(y: jax.Array, bias: jax.Array | None, with_relu: bool, spec: Sequence[int]) -> jax.Array:
    """What follows a convolution: the bias, if any, and relu if asked for."""
    y = y if bias is None else add_bias(y, bias, spec)
    return relu(y) if with_relu else y


@jax.custom_jvp
def relu(x: jax.Array) -> jax.Array:
    """`jax.nn.relu`, whose derivative here is read off the result: x need not be kept beside it."""
    return jnp.maximum(x, 0)


@relu.defjvp
def _relu_jvp(primals, tangents):
    y = relu(*primals)
    return y, where_passed(y, *tangents)


def where_passed(y: jax.Array, derivative: jax.Array) -> jax.Array:
    """The derivative where relu, which gave y, passed its argument on; 0 where that was 0, negative or NaN."""
    return jnp.where(y > 0, derivative, jnp.zeros((), derivative.dtype))


def add_bias(y: jax.Array, bias: jax.Array, spec: Sequence[int]) -> jax.Array:
    """y + bias [C] along the feature axis of y, laid out by `spec`.

    16-bit types are added in float32: then their gradient, a sum over all of y, is summed in float32 too.
    """
    wide = jnp.dtype(jnp.float32) if y.dtype.itemsize == 2 else y.dtype
    spread = lax.expand_dims(bias.astype(wide), [axis for axis in range(y.ndim) if axis != spec[1]])
    return (y.astype(wide) + spread).astype(y.dtype)


def backward_input(geometry: Geometry, precision: Any, dy: jax.Array, w: jax.Array) -> jax.Array:
    features = w.shape[geometry.rhs_spec[1]] * geometry.feature_group_count
    shape = shape_of(geometry.lhs_spec, dy.shape[geometry.out_spec[0]], features, geometry.x_spatial)
    x, _ = vary_alike(jnp.zeros(shape, dy.dtype), dy)
    (dx,) = jax.linear_transpose(lambda x: _convolve(geometry, precision, x, w), x)(dy)
    return dx


def backward_filter(
    geometry: Geometry, precision: Any, want_bias: bool, x: jax.Array, dy: jax.Array
) -> tuple[jax.Array, jax.Array | None]:
    plain = partial(_weight_gradient, geometry, precision)
    if geometry.feature_group_count > 1:
        by_taps = partial(_grouped_weight_gradient, geometry, precision)
        dw = lax.platform_dependent(x, dy, cuda=plain, default=by_taps)  # on a GPU, XLA has kernels for groups
    else:
        dw = plain(x, dy)
    return dw, bias_gradient(geometry, dy) if want_bias else None


def _weight_gradient(geometry: Geometry, precision: Any, x: jax.Array, dy: jax.Array) -> jax.Array:
    features = (dy.shape[geometry.out_spec[1]], x.shape[geometry.lhs_spec[1]] // geometry.feature_group_count)
    # Were it the same for all devices, the transpose would sum over them, as the rule that asks for dw does later.
    w, _ = vary_alike(jnp.zeros(shape_of(geometry.rhs_spec, *features, geometry.w_spatial), x.dtype), x)
    (dw,) = jax.linear_transpose(lambda w: _convolve(geometry, precision, x, w), w)(dy)
    return dw


def bias_gradient(geometry: Geometry, dy: jax.Array) -> jax.Array:
    """dy summed over all but its feature axis."""
    return dy.sum([axis for axis in range(dy.ndim) if axis != geometry.out_spec[1]])


def _grouped_weight_gradient(geometry: Geometry, precision: Any, x: jax.Array, dy: jax.Array) -> jax.Array:
    groups, spatial = geometry.feature_group_count, len(geometry.w_spatial)
    x = _by_group(x, geometry.lhs_spec, groups)
    x = lax.pad(x, jnp.zeros((), x.dtype), [(0, 0, 0), (0, 0, 0), *((*p, 0) for p in geometry.padding), (0, 0, 0)])
    dy = _by_group(dy, geometry.out_spec, groups)
    dy = dy.reshape(groups, -1, dy.shape[-1])
    spans = [(n - 1) * s + 1 for n, s in zip(geometry.y_spatial, geometry.window_strides, strict=True)]

    def tap(offsets: Any) -> jax.Array:
        """[G, output features of a group, input features of a group] of one tap of the window."""
        start = [o * d for o, d in zip(offsets, geometry.rhs_dilation, strict=True)]
        met = lax.dynamic_slice(x, (0, 0, *start, 0), (*x.shape[:2], *spans, x.shape[-1]))
        met = lax.slice(met, (0,) * met.ndim, met.shape, (1, 1, *geometry.window_strides, 1))
        met = met.reshape(groups, -1, met.shape[-1])
        return lax.dot_general(dy, met, (((1,), (1,)), ((0,), (0,))), precision=precision)

    window = geometry.w_spatial
    if (taps := math.prod(window)) <= _MOST_TAPS_UNROLLED:
        found = jnp.stack([tap(offsets) for offsets in itertools.product(*map(range, window))])
    else:  # computed and not a constant, which `custom_partitioning` takes none of
        found = lax.map(lambda i: tap(jnp.unravel_index(i, window)), jnp.arange(taps))
    # [taps, G, O, I] -> [G O, I, window], and from there to w's own order of axes.
    found = found.reshape(*geometry.w_spatial, -1, found.shape[-1])
    canonical = jnp.moveaxis(found, (spatial, spatial + 1), (0, 1))
    return jnp.transpose(canonical, [geometry.rhs_spec.index(axis) for axis in range(spatial + 2)])


def _by_group(array: jax.Array, spec: tuple[int, ...], groups: int) -> jax.Array:
    """[G, N, *spatial, features of a group]"""
    batch, feature, *spatial = spec
    array = jnp.transpose(array, (batch, *spatial, feature))
    return jnp.moveaxis(array.reshape(*array.shape[:-1], groups, -1), -2, 0)
