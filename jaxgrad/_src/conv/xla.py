"""The convolution triangle on plain XLA, which is given products of matrices where it is slow at convolutions.

A window that covers all of x is one product. XLA writes the weight gradient of a grouped convolution as one with
`batch_group_count`, for which its CPU backend has no fast code; there it is a product for each tap of the window: the
elements of x that the tap meets, times dy, group by group. Those of examples, which JAX makes groups of, are such
products on every platform.
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

from jaxgrad._conv_geometry import Geometry, oriented, shape_of
from jaxgrad._partitioning import vary_alike

PRODUCT = "XLA computes a window that covers all of x as a product of matrices"

_MOST_TAPS_UNROLLED = 64
_TAPS_BYTES = 1 << 29  # of what is met by the taps that a GPU takes together


def forward(
    geometry: Geometry, precision: Any, relu: bool, x: jax.Array, w: jax.Array, bias: jax.Array | None
) -> jax.Array:
    return finish(_convolve(geometry, precision, x, w), bias, relu, geometry.out_spec)


def _convolve(geometry: Geometry, precision: Any, x: jax.Array, w: jax.Array) -> jax.Array:
    w = oriented(geometry, w)
    if geometry.is_product:
        return _product(geometry, precision, x, w)
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


def _product(geometry: Geometry, precision: Any, x: jax.Array, w: jax.Array) -> jax.Array:
    """y, as a product of matrices, and by its transposes dx and dw too: XLA and the libraries would convolve.

    From 100 features to 4 x 4 x 1024 that takes cuDNN, as XLA calls it, 1.7 to 5 times as long on an H200.
    """
    of_x, of_w = geometry.lhs_spec[1:], geometry.rhs_spec[1:]
    in_memory = sorted(range(len(of_x)), key=lambda i: of_x[i])  # so that x need not be transposed
    contracted = tuple(of_x[i] for i in in_memory), tuple(of_w[i] for i in in_memory)
    y = lax.dot_general(x, w, (contracted, ((), ())), precision=precision)
    batch, feature, *spatial = geometry.out_spec
    return lax.expand_dims(y if batch < feature else y.T, spatial)


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


def backward_filter_of_examples(
    geometry: Geometry, precision: Any, want_bias: bool, x: jax.Array, dy: jax.Array
) -> tuple[jax.Array, jax.Array | None]:
    """The same of independent examples, along an axis before the geometry's of x, dy and the results.

    A GPU has memory to take many taps together: one product of matrices for each example, of what all taps of the
    window meet. As groups of one convolution, which is what JAX makes of them, they take XLA 3 to 700 times as long.
    """
    of_cpu, of_gpu = (partial(_examples_weight_gradients, geometry, precision, limit) for limit in (0, _TAPS_BYTES))
    dw = lax.platform_dependent(x, dy, cuda=of_gpu, default=of_cpu)
    return dw, jax.vmap(partial(bias_gradient, geometry))(dy) if want_bias else None


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
    (dw,) = _examples_weight_gradients(geometry, precision, 0, x[None], dy[None])
    return dw


def _examples_weight_gradients(
    geometry: Geometry, precision: Any, taps_bytes: int, x: jax.Array, dy: jax.Array
) -> jax.Array:
    """dw of each example, tap by tap, or by as many taps together as meet no more than `taps_bytes` of x."""
    examples, groups, spatial = x.shape[0], geometry.feature_group_count, len(geometry.w_spatial)
    x = _by_group(x, geometry.lhs_spec, groups)
    x = lax.pad(x, jnp.zeros((), x.dtype), [(0, 0, 0), (0, 0, 0), *((*p, 0) for p in geometry.padding), (0, 0, 0)])
    dy = _by_group(dy, geometry.out_spec, groups)
    dy = dy.reshape(dy.shape[0], -1, dy.shape[-1])
    spans = [(n - 1) * s + 1 for n, s in zip(geometry.y_spatial, geometry.window_strides, strict=True)]

    def met(offsets: Any) -> jax.Array:
        """[E G, positions, input features of a group], the elements of x that one tap of the window meets."""
        start = [o * d for o, d in zip(offsets, geometry.rhs_dilation, strict=True)]
        found = lax.dynamic_slice(x, (0, 0, *start, 0), (*x.shape[:2], *spans, x.shape[-1]))
        found = lax.slice(found, (0,) * found.ndim, found.shape, (1, 1, *geometry.window_strides, 1))
        return found.reshape(found.shape[0], -1, found.shape[-1])

    def product(taps: Sequence[Any]) -> jax.Array:
        """[E G, output features of a group, taps, input features of a group]"""
        elements = jnp.concatenate([met(offsets) for offsets in taps], -1)
        found = lax.dot_general(dy, elements, (((1,), (1,)), ((0,), (0,))), precision=precision)
        return found.reshape(*found.shape[:2], len(taps), -1)

    window = geometry.w_spatial
    if math.prod(window) <= _MOST_TAPS_UNROLLED:
        taps = list(itertools.product(*map(range, window)))
        tap_bytes = math.prod(dy.shape[:2]) * x.shape[-1] * x.dtype.itemsize
        together = max(1, min(len(taps), taps_bytes // tap_bytes))
        found = jnp.concatenate([product(taps[i : i + together]) for i in range(0, len(taps), together)], 2)
    else:  # computed and not a constant, which `custom_partitioning` takes none of
        indices = jnp.arange(math.prod(window))
        found = jnp.moveaxis(lax.map(lambda i: product([jnp.unravel_index(i, window)])[:, :, 0], indices), 0, 2)
    # [E G, O, taps, I] -> [E, G O, I, window], and from there to w's own order of axes.
    found = found.reshape(examples, -1, *window, found.shape[-1])
    canonical = jnp.moveaxis(found, -1, 2)
    dw = jnp.transpose(canonical, [0, *(1 + geometry.rhs_spec.index(axis) for axis in range(spatial + 2))])
    return oriented(geometry, dw)


def _by_group(array: jax.Array, spec: tuple[int, ...], groups: int) -> jax.Array:
    """[E G, N, *spatial, features of a group] of an array with an axis of examples before those of `spec`."""
    batch, feature, *spatial = (axis + 1 for axis in spec)
    array = jnp.transpose(array, (0, batch, *spatial, feature))
    array = jnp.moveaxis(array.reshape(*array.shape[:-1], groups, -1), -2, 1)
    return array.reshape(-1, *array.shape[2:])
