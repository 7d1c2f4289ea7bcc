"""The weight gradient by taps: for each tap of the window, a matrix product of dy and the elements of x under the tap.

JAX writes the weight gradient of a convolution with groups as a convolution with `batch_group_count`, for which XLA has
no fast code on a CPU, and on a GPU for some windows only.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxgrad._src.conv.call.geometry import ConvGeometry, maybe_reverse_window, pad_spatial

_MOST_TAPS_UNROLLED = 64
_GATHERED_BYTES = 1 << 29  # of the elements of x that a GPU gathers for one matrix product


def weight_gradient_by_taps(geometry: ConvGeometry, precision: Any, x: jax.Array, dy: jax.Array) -> jax.Array:
    """dw in the layout of w."""
    features, out_features = x.shape[geometry.lhs_spec[1]], dy.shape[geometry.out_spec[1]]
    if features == out_features == geometry.feature_group_count:
        return _of_depthwise(geometry, precision, x, dy)
    (dw,) = _of_groups(geometry, precision, 0, x[None], dy[None])
    return dw


def weight_gradients_of_problems(geometry: ConvGeometry, precision: Any, x: jax.Array, dy: jax.Array) -> jax.Array:
    """dw of independent problems, along a first axis of x, dy and the result.

    A GPU has the memory to take many taps at once: one matrix product for each problem, of the elements of x under all
    taps of the window. JAX makes groups of one convolution of them, for which XLA is slow if the problems are small.
    """
    on_cpu, on_gpu = (partial(_of_groups, geometry, precision, limit) for limit in (0, _GATHERED_BYTES))
    return lax.platform_dependent(x, dy, cuda=on_gpu, default=on_cpu)


def _of_depthwise(geometry: ConvGeometry, precision: Any, x: jax.Array, dy: jax.Array) -> jax.Array:
    """A dot product over all positions for each tap and channel, of x and dy in their layouts: XLA copies neither."""
    x = pad_spatial(x, geometry.lhs_spec, geometry.padding)
    (x_batch, x_channels, *x_spatial), (dy_batch, dy_channels, *dy_spatial) = geometry.lhs_spec, geometry.out_spec
    positions = (dy_batch, *dy_spatial), (x_batch, *x_spatial)
    dimensions = positions, ((dy_channels,), (x_channels,))

    def products(taps: Sequence[Sequence[Any]]) -> jax.Array:
        (tap,) = taps
        found = lax.dot_general(dy, _under_tap(geometry, x, x_spatial, tap), dimensions, precision=precision)
        return found[None, :, None, None]

    return _in_layout_of_w(geometry, _of_all_taps(geometry.w_spatial, 1, products))[0]


def _of_groups(geometry: ConvGeometry, precision: Any, gathered_bytes: int, x: jax.Array, dy: jax.Array) -> jax.Array:
    """dw of each independent problem, tap by tap, or by as many taps at once as gather at most so many bytes of x."""
    num_problems, groups, spatial = x.shape[0], geometry.feature_group_count, range(2, len(geometry.w_spatial) + 2)
    x = _by_group(x, geometry.lhs_spec, groups)
    x = pad_spatial(x, (0, x.ndim - 1, *spatial), geometry.padding)
    dy = _by_group(dy, geometry.out_spec, groups)
    dy = dy.reshape(dy.shape[0], -1, dy.shape[-1])

    def products(taps: Sequence[Sequence[Any]]) -> jax.Array:
        elements = jnp.concatenate([_under_tap(geometry, x, spatial, tap) for tap in taps], -1)
        elements = elements.reshape(elements.shape[0], -1, elements.shape[-1])  # [P G, positions, taps I]
        found = lax.dot_general(dy, elements, (((1,), (1,)), ((0,), (0,))), precision=precision)
        return found.reshape(num_problems, -1, len(taps), x.shape[-1])

    tap_bytes = math.prod(dy.shape[:2]) * x.shape[-1] * x.dtype.itemsize
    at_once = max(1, gathered_bytes // tap_bytes) if tap_bytes else 1
    return _in_layout_of_w(geometry, _of_all_taps(geometry.w_spatial, at_once, products))


def _under_tap(geometry: ConvGeometry, x: jax.Array, spatial: Sequence[int], tap: Sequence[Any]) -> jax.Array:
    """The elements of x, which is padded, that one tap of the window multiplies. `spatial` are the axes of x."""
    start, size, strides = [0] * x.ndim, list(x.shape), [1] * x.ndim
    for axis, offset, dilation, positions, stride in zip(
        spatial, tap, geometry.rhs_dilation, geometry.y_spatial, geometry.window_strides, strict=True
    ):
        start[axis], size[axis], strides[axis] = offset * dilation, (positions - 1) * stride + 1, stride
    found = lax.dynamic_slice(x, start, size)
    return lax.slice(found, (0,) * x.ndim, size, strides)


def _of_all_taps(
    window: Sequence[int], at_once: int, products: Callable[[Sequence[Sequence[Any]]], jax.Array]
) -> jax.Array:
    """Joins the products of all taps of a window.

    Args:
      window: its sizes.
      at_once: for so many taps at a time.
      products: a function of taps, each the offsets in the window: [P, out features, taps, features of a group].
    """
    if math.prod(window) <= _MOST_TAPS_UNROLLED:
        taps = list(itertools.product(*map(range, window)))
        return jnp.concatenate([products(taps[i : i + at_once]) for i in range(0, len(taps), at_once)], 2)
    # Computed, because `custom_partitioning` does not accept constants.
    indices = jnp.arange(math.prod(window))
    return jnp.moveaxis(lax.map(lambda i: products([jnp.unravel_index(i, window)])[:, :, 0], indices), 0, 2)


def _in_layout_of_w(geometry: ConvGeometry, dw: jax.Array) -> jax.Array:
    """[P, out features, taps, features of a group] in the layout of w, after the axis of P problems."""
    dw = jnp.moveaxis(dw.reshape(*dw.shape[:2], *geometry.w_spatial, dw.shape[-1]), -1, 2)
    dw = jnp.transpose(dw, [0, *(1 + geometry.rhs_spec.index(axis) for axis in range(dw.ndim - 1))])
    return maybe_reverse_window(geometry, dw)


def _by_group(array: jax.Array, spec: tuple[int, ...], groups: int) -> jax.Array:
    """[P G, N, *spatial, features of a group] of an array with an axis of P problems before the axes of `spec`."""
    batch, feature, *spatial = (axis + 1 for axis in spec)
    array = jnp.transpose(array, (0, batch, *spatial, feature))
    array = jnp.moveaxis(array.reshape(*array.shape[:-1], groups, -1), -2, 1)
    return array.reshape(-1, *array.shape[2:])
