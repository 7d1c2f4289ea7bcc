"""The geometry of a convolution: layouts, window, padding and spatial sizes, and how a convolution is transposed."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxgrad._src.native.ffi import short_dtype

Pairs = tuple[tuple[int, int], ...]


@dataclasses.dataclass(frozen=True)
class ConvGeometry:
    """The geometry of a forward convolution y = conv(x, w). All three passes (y, dx, dw) share it.

    Attributes:
      lhs_spec, rhs_spec, out_spec: the axes of x, w and y, as in `jax.lax.ConvDimensionNumbers`: batch, feature and
        spatial axes; for w output feature, input feature and spatial axes.
      window_strides, padding, rhs_dilation: as in `jax.lax.conv_general_dilated`, with one pair of padding sizes for
        each spatial axis, none negative.
      feature_group_count: the number of groups.
      x_spatial, w_spatial: the spatial sizes of x and w, in the order of the spatial axes.
      window_reversed: whether the passes take w, and return dw, with the spatial axes reversed.
    """

    lhs_spec: tuple[int, ...]
    rhs_spec: tuple[int, ...]
    out_spec: tuple[int, ...]
    window_strides: tuple[int, ...]
    padding: Pairs
    rhs_dilation: tuple[int, ...]
    feature_group_count: int
    x_spatial: tuple[int, ...]
    w_spatial: tuple[int, ...]
    window_reversed: bool = False

    @property
    def dimension_numbers(self) -> lax.ConvDimensionNumbers:
        return lax.ConvDimensionNumbers(self.lhs_spec, self.rhs_spec, self.out_spec)

    @cached_property
    def y_spatial(self) -> tuple[int, ...]:
        return tuple(
            output_size(n, k, s, pads, d)
            for n, k, s, pads, d in zip(
                self.x_spatial, self.w_spatial, self.window_strides, self.padding, self.rhs_dilation, strict=True
            )
        )

    @cached_property
    def is_matrix_product(self) -> bool:
        """Whether the window covers all of x and more than one position, so that y is a matrix product of x and w."""
        covers = self.x_spatial == self.w_spatial and not any(map(any, self.padding))
        return covers and math.prod(self.w_spatial) > 1 and self.feature_group_count == 1

    @cached_property
    def has_disjoint_windows(self) -> bool:
        """Whether windows have several elements and do not overlap, so that each pass is a matrix product."""
        axes = zip(self.w_spatial, self.rhs_dilation, self.window_strides, strict=True)
        disjoint = all(dilated_size(window, dilation) <= stride for window, dilation, stride in axes)
        return disjoint and math.prod(self.w_spatial) > 1

    def attributes(self) -> dict[str, Any]:
        """The attributes of every convolution handler, which the compiled planners take too: ints and lists of ints."""
        return {
            "lhs_spec": list(self.lhs_spec),
            "rhs_spec": list(self.rhs_spec),
            "out_spec": list(self.out_spec),
            "window_strides": list(self.window_strides),
            "padding": [size for pair in self.padding for size in pair],
            "rhs_dilation": list(self.rhs_dilation),
            "feature_group_count": self.feature_group_count,
        }

    def with_padded_x(self, pairs: Pairs) -> ConvGeometry:
        """The geometry of the same convolution, where `pairs`, a part of the padding, is added to x beforehand."""
        if not any(map(any, pairs)):
            return self
        left = tuple((low - a, high - b) for (low, high), (a, b) in zip(self.padding, pairs, strict=True))
        x_spatial = tuple(size + sum(pair) for size, pair in zip(self.x_spatial, pairs, strict=True))
        return dataclasses.replace(self, padding=left, x_spatial=x_spatial)

    def in_groups(self, count: int) -> ConvGeometry:
        """The geometry of one convolution whose groups are `count` convolutions of this geometry."""
        return dataclasses.replace(self, feature_group_count=self.feature_group_count * count)


def dilated_size(size: int, dilation: int) -> int:
    """The extent of `size` elements with `dilation` between them."""
    return 0 if size == 0 else 1 + (size - 1) * dilation


def output_size(size: int, window: int, stride: int, padding: tuple[int, int], window_dilation: int) -> int:
    """The number of windows that fit, at least 0."""
    return max(0, (size + sum(padding) - dilated_size(window, window_dilation)) // stride + 1)


def pad_spatial(array: jax.Array, spec: Sequence[int], pairs: Pairs, dilation: Sequence[int] = ()) -> jax.Array:
    """Dilates and pads the spatial axes with zeros; negative padding crops."""
    dilation = dilation or (1,) * len(pairs)
    if not any(map(any, pairs)) and max(dilation, default=1) == 1:
        return array
    config = [(0, 0, 0)] * array.ndim
    for axis, (low, high), factor in zip(spec[2:], pairs, dilation, strict=True):
        config[axis] = (low, high, factor - 1)
    return lax.pad(array, jnp.zeros((), array.dtype), config)


def maybe_reverse_window(geometry: ConvGeometry, w: jax.Array) -> jax.Array:
    """Reverses the spatial axes of w if the geometry says so: from the passes' order to that of `jax.lax`, or back.

    w may have an axis of independent problems before the axes of the geometry.
    """
    if not geometry.window_reversed:
        return w
    first = w.ndim - len(geometry.rhs_spec)
    return lax.rev(w, [first + axis for axis in geometry.rhs_spec[2:]])


def change_layout(array: jax.Array, spec: Sequence[int], to_spec: Sequence[int]) -> jax.Array:
    """Transposes an array from the layout `spec` to the layout `to_spec`."""
    if tuple(spec) == tuple(to_spec):
        return array
    return jnp.transpose(array, [spec[to_spec.index(axis)] for axis in range(array.ndim)])


def swap_features(w: jax.Array, rhs_spec: Sequence[int], groups: int) -> jax.Array:
    """Swaps input and output features within each group, in the layout of w: [G O, I, ...] becomes [G I, O, ...]."""
    canonical = jnp.transpose(w, rhs_spec)
    out, inn, *window = canonical.shape
    grouped = canonical.reshape(groups, out // groups, inn, *window)
    swapped = jnp.swapaxes(grouped, 1, 2).reshape(groups * inn, out // groups, *window)
    return jnp.transpose(swapped, [tuple(rhs_spec).index(axis) for axis in range(w.ndim)])


def unread_padding(low: int, high: int, stride: int) -> int:
    """The padding to add at the high end of an axis: less than a stride, which no window reads.

    JAX writes gradients with the least padding there. Kernels are faster for the same padding at both ends, and
    negative padding needs a copy.
    """
    for total in (low, 0):
        if total >= 0 and 0 <= total - high < stride:
            return total - high
    return 0


def transpose_padding(window: int, stride: int, padding: str | tuple[int, int]) -> tuple[int, int]:
    """The padding of the dilated lhs that transposes a forward convolution with `padding`, as `jax.lax.conv_transpose`.

    "SAME" gives an output size of stride * size, "VALID" one of stride * size + max(window - stride, 0).
    """
    if isinstance(padding, str):
        total = window + stride - 2 + (max(window - stride, 0) if padding == "VALID" else 0)
        low = window - 1 if padding == "VALID" or stride > window - 1 else math.ceil(total / 2)
        return low, total - low
    return window - 1 - padding[0], window - 1 - padding[1]


def unusual(**parameters: Any) -> list[str]:
    """The parameters of a convolution that differ from their defaults, as texts without spaces."""
    found = []
    for name, value in parameters.items():
        default = {"padding": (0, 0), "window_reversed": False}.get(name, 1)
        if any(each != default for each in (value if isinstance(value, tuple) else (value,))):
            found.append(f"{name}={value}".replace(" ", ""))
    return found


def described(dtype: Any, shape: Sequence[int], spec: Sequence[int], leading: str) -> str:
    """The dtype, shape and layout of an array, such as "f32[8,32,32,3] NHWC".

    Args:
      dtype: its dtype.
      shape: its shape, which may have axes of independent problems before those of the layout.
      spec: its layout.
      leading: the letters of the first two axes of the layout. Axes without a letter, as in four spatial axes, are "?".
    """
    names = dict(zip(spec, leading + "DHW"[5 - len(spec) :], strict=False)) if len(spec) <= 5 else {}
    layout = "P" * (len(shape) - len(spec)) + "".join(names.get(axis, "?") for axis in range(len(spec)))
    return f"{short_dtype(dtype)}[{','.join(map(str, shape))}] {layout}"
