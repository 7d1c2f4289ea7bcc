"""The geometry of convolutions: what is static in a call, and how convolutions are transposed."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
from jax import lax

Pairs = tuple[tuple[int, int], ...]


@dataclasses.dataclass(frozen=True)
class Geometry:
    """A forward convolution y = conv(x, w), whichever of its three operands is being computed.

    Attributes:
      lhs_spec, rhs_spec, out_spec: the axes of x, w and y as `jax.lax.ConvDimensionNumbers` gives them: batch, feature
        and spatial axes, for w output feature, input feature and spatial axes.
      window_strides, padding, rhs_dilation: as for `jax.lax.conv_general_dilated`, a pair of padding sizes to each
        spatial axis, none negative.
      feature_group_count: the number of groups.
      x_spatial, w_spatial: the spatial sizes of x and w, in the order of the spatial axes.
      window_reversed: the units take w, and give dw, with its spatial axes reversed.
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

    @property
    def y_spatial(self) -> tuple[int, ...]:
        return tuple(
            output_size(n, k, s, pads, d)
            for n, k, s, pads, d in zip(
                self.x_spatial, self.w_spatial, self.window_strides, self.padding, self.rhs_dilation, strict=True
            )
        )

    @property
    def is_product(self) -> bool:
        """The window covers all of x and is more than a point, so that y is a product of x and w as matrices."""
        covers = self.x_spatial == self.w_spatial and not any(map(any, self.padding))
        return covers and math.prod(self.w_spatial) > 1 and self.feature_group_count == 1

    @property
    def suits_xla(self) -> bool:
        """XLA is at its best without the triangle around it: unless `_conv_xla.py` writes the convolution otherwise."""
        return self.feature_group_count == 1 and not self.is_product

    def in_groups(self, count: int) -> Geometry:
        """The geometry of one convolution whose groups are as many of this one."""
        return dataclasses.replace(self, feature_group_count=self.feature_group_count * count)


def dilated_size(size: int, dilation: int) -> int:
    """The extent of `size` elements that stand `dilation` apart."""
    return 0 if size == 0 else 1 + (size - 1) * dilation


def output_size(size: int, window: int, stride: int, padding: tuple[int, int], window_dilation: int) -> int:
    """How many windows fit, at least 0."""
    return max(0, (size + sum(padding) - dilated_size(window, window_dilation)) // stride + 1)


def shape_of(spec: Sequence[int], first: int, second: int, spatial: Sequence[int]) -> tuple[int, ...]:
    """The shape of an operand whose axes are laid out by `spec`."""
    shape = [0] * len(spec)
    for axis, size in zip(spec, (first, second, *spatial), strict=True):
        shape[axis] = size
    return tuple(shape)


def oriented(geometry: Geometry, w: jax.Array) -> jax.Array:
    """w from how a unit takes it to how `jax.lax` and the kernels do, or back: reversed where the geometry says so.

    It may have an axis of examples before the geometry's.
    """
    if not geometry.window_reversed:
        return w
    first = w.ndim - len(geometry.rhs_spec)
    return lax.rev(w, [first + axis for axis in geometry.rhs_spec[2:]])


def leading_sizes(array: Any, spec: Sequence[int]) -> tuple[int, int]:
    """The sizes of the first two axes of `spec`, in an array that may have an axis of examples before them all."""
    shape = array.shape[array.ndim - len(spec) :]
    return shape[spec[0]], shape[spec[1]]


def transposed(
    lhs_shape: Sequence[int],
    rhs_shape: Sequence[int],
    dn: lax.ConvDimensionNumbers,
    strides: Sequence[int],
    padding: Pairs,
    rhs_dilation: Sequence[int],
    groups: int,
    window_reversed: bool,
) -> tuple[Geometry, Pairs]:
    """The convolution of which one with `lhs_dilation=strides` and unit window strides is the input gradient.

    A convolution of a dilated lhs with a window of extent K and padding (a, b) is the transpose of one with those
    strides and padding (K - 1 - a, K - 1 - b) whose window is reversed and whose feature axes are swapped.

    Args:
      lhs_shape, rhs_shape, dn, strides, padding, rhs_dilation, groups: those of the call, `strides` its lhs_dilation.
      window_reversed: the call itself reverses the window of its rhs, which then is that of the other convolution.

    Returns:
      The geometry of that convolution, with x the call's result and y its lhs, and the sizes by which its x must be
      padded on either side of each spatial axis (negative: cropped) to come to the call's result.
    """
    windows = [dilated_size(rhs_shape[axis], d) for axis, d in zip(dn.rhs_spec[2:], rhs_dilation, strict=True)]
    own = [(k - 1 - low, k - 1 - high) for k, (low, high) in zip(windows, padding, strict=True)]
    # A negative padding there crops x, so here it pads the result.
    extra = tuple((max(0, -low), max(0, -high)) for low, high in own)
    kept = tuple((max(0, low), max(0, high)) for low, high in own)
    x_spatial = tuple(
        (lhs_shape[axis] - 1) * stride + window - low - high
        for axis, stride, window, (low, high) in zip(dn.lhs_spec[2:], strides, windows, kept, strict=True)
    )
    out, inn, *spatial = dn.rhs_spec
    geometry = Geometry(
        lhs_spec=tuple(dn.out_spec),
        rhs_spec=(inn, out, *spatial) if groups == 1 else (out, inn, *spatial),
        out_spec=tuple(dn.lhs_spec),
        window_strides=tuple(strides),
        padding=kept,
        rhs_dilation=tuple(rhs_dilation),
        feature_group_count=groups,
        x_spatial=x_spatial,
        w_spatial=tuple(rhs_shape[axis] for axis in spatial),
        window_reversed=not window_reversed,
    )
    return geometry, extra


def transpose_padding(window: int, stride: int, padding: str | tuple[int, int]) -> tuple[int, int]:
    """The padding of a convolution of the dilated lhs that transposes a forward convolution with `padding`.

    As `jax.lax.conv_transpose` has it: "SAME" gives an output of stride * size, "VALID" one of
    stride * size + max(window - stride, 0).
    """
    if isinstance(padding, str):
        total = window + stride - 2 + (max(window - stride, 0) if padding == "VALID" else 0)
        low = window - 1 if padding == "VALID" or stride > window - 1 else math.ceil(total / 2)
        return low, total - low
    return window - 1 - padding[0], window - 1 - padding[1]
