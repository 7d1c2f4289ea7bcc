"""Convolutions whose windows do not overlap, such as patch embeddings, as a matrix product of patches and weights.

No element of x is in two windows, so x can be rearranged into patches: each spatial axis is divided into the positions
of y and the elements of the window. Each of the passes y = patches w, dpatches = dy w' and dw = patches' dy is then one
matrix product, or for y one for each of a few groups. JAX writes both gradients as convolutions with a dilation, for
which XLA has slow kernels or none.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import string
from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxgrad._src.conv.call.geometry import ConvGeometry, dilated_size, pad_spatial
from jaxgrad._src.conv.call.problem import laid_out

_TENSOR_CORE = 8  # the features that kernels take at a time; they pad fewer
_ALIGNED_BYTES = 16  # of a row, for the fastest kernels of cuBLAS
_FEW_GROUPS = 4


def has_few_groups(geometry: ConvGeometry) -> bool:
    """Whether `products_by_group` makes a product for each group."""
    return 1 < geometry.feature_group_count <= _FEW_GROUPS


def product_of_patches(geometry: ConvGeometry, precision: Any, x: jax.Array, w: jax.Array) -> jax.Array:
    """y, where windows do not overlap. The transposes in x and in w, dx and dw, are matrix products too."""
    g, groups = geometry, geometry.feature_group_count
    if _is_product_of_rows(g, x):
        return _product_of_rows(g, precision, x, w)
    batch, features, *spatial = g.lhs_spec
    out_features = w.shape[g.rhs_spec[0]]
    # Letters in the order of the axes of x. `jnp.einsum` sums in their order, to rearrange x as little as possible.
    letters = iter(string.ascii_lowercase)
    of_x = [next(letters) if axis == batch else next(letters) + next(letters) for axis in range(x.ndim)]
    group, feature = of_x[features][0], of_x[features][1]
    of_w = laid_out(g.rhs_spec, group + "z", feature, [of_x[axis][1] for axis in spatial])
    of_y = laid_out(g.out_spec, of_x[batch], group + "z", [of_x[axis][0] for axis in spatial])
    subscripts = f"{''.join(of_x)},{''.join(of_w)}->{''.join(of_y)}"
    y = jnp.einsum(subscripts, _patches(g, x), _split(w, {g.rhs_spec[0]: groups}), precision=precision)
    return y.reshape(laid_out(g.out_spec, x.shape[batch], out_features, g.y_spatial))


def products_by_group(geometry: ConvGeometry, precision: Any, x: jax.Array, w: jax.Array) -> jax.Array:
    """y as by `product_of_patches`, for the forward pass: a few groups have a product each.

    On a GPU, XLA takes longer to move the groups before the patches than to rearrange the slice of each group. The
    gradients would be slower as products of single groups. On a CPU both forms take about as long.
    """
    groups = geometry.feature_group_count
    if not has_few_groups(geometry):
        return product_of_patches(geometry, precision, x, w)
    product = partial(product_of_patches, dataclasses.replace(geometry, feature_group_count=1), precision)
    of_groups = zip(jnp.split(x, groups, geometry.lhs_spec[1]), jnp.split(w, groups, geometry.rhs_spec[0]), strict=True)
    return jnp.concatenate([product(*each) for each in of_groups], geometry.out_spec[1])


def _is_product_of_rows(geometry: ConvGeometry, x: jax.Array) -> bool:
    """Whether the last window axis and the features are one axis of the product.

    XLA then makes a matrix of the patches first. On a GPU it then calls cuBLAS, which is faster where the rows of the
    matrix are aligned, and slower elsewhere. On a CPU the matrix is slower with many features.
    """
    g, n, features = geometry, len(geometry.w_spatial), x.shape[-1]
    last = (0, n + 1, *range(1, n + 1))
    adjacent = g.lhs_spec == last and g.out_spec == last and g.rhs_spec == (n + 1, n, *range(n))
    is_aligned = math.prod(g.w_spatial) * features * x.dtype.itemsize % _ALIGNED_BYTES == 0
    return adjacent and is_aligned and features < _TENSOR_CORE and g.feature_group_count == 1


def _product_of_rows(geometry: ConvGeometry, precision: Any, x: jax.Array, w: jax.Array) -> jax.Array:
    """y, with the axes of x (batch, position, window, ..., position, window and feature)."""
    out = 2 * len(geometry.w_spatial) + 1
    windows, positions = range(2, out, 2), range(1, out, 2)
    patches = _patches(geometry, x)
    rows, w = patches.reshape(*patches.shape[:-3], -1), w.reshape(*w.shape[:-3], -1, w.shape[-1])
    return jnp.einsum(rows, range(out), w, [*windows, out], [0, *positions, out], precision=precision)


def _patches(geometry: ConvGeometry, x: jax.Array) -> jax.Array:
    """x with its features divided into (group, feature) and each spatial axis into (position of y, window element)."""
    g = geometry
    extents = map(dilated_size, g.w_spatial, g.rhs_dilation)
    # The stride of a single window does not matter, and may be much larger than x.
    steps = (extent if y == 1 else s for extent, y, s in zip(extents, g.y_spatial, g.window_strides, strict=True))
    axes = zip(g.x_spatial, g.y_spatial, steps, g.padding, strict=True)
    # The high padding is negative where no window reads the last elements.
    padding = tuple((low, y * step - size - low) for size, y, step, (low, _) in axes)
    positions = dict(zip(g.lhs_spec[2:], g.y_spatial, strict=True))
    x = _split(pad_spatial(x, g.lhs_spec, padding), {g.lhs_spec[1]: g.feature_group_count, **positions})
    read = [slice(0, dilated_size(k, d), d) for k, d in zip(g.w_spatial, g.rhs_dilation, strict=True)]
    whole = slice(None)
    index = laid_out(g.lhs_spec, [whole], [whole, whole], [[whole, elements] for elements in read])
    return x[tuple(itertools.chain.from_iterable(index))]


def _split(array: jax.Array, parts: Mapping[int, int]) -> jax.Array:
    """The array with some axes divided into two: by axis, the size of the first one."""
    shape = [(parts[axis], size // parts[axis]) if axis in parts else (size,) for axis, size in enumerate(array.shape)]
    return array.reshape(tuple(itertools.chain.from_iterable(shape)))
