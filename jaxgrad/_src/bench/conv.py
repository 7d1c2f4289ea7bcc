"""A convolution or transposed convolution, in three passes, on jaxgrad and on `jax.lax`."""

from __future__ import annotations

import dataclasses
import math
from functools import partial
from typing import Any

import jax
from jax import lax

from jaxgrad._src.bench.call import Pass, gradient, shaped, value
from jaxgrad._src.choice.explain import Explanation, explain
from jaxgrad._src.conv.api import conv_general_dilated
from jaxgrad._src.conv.call.geometry import dilated_size, output_size, transpose_padding
from jaxgrad._src.conv.transpose import conv_transpose

_PASSES = (
    Pass("forward", partial(value, inputs=2), (0,)),
    Pass("input gradient", partial(gradient, inputs=2, index=0), (1,)),
    Pass("weight gradient", partial(gradient, inputs=2, index=1), (2,)),
)


@dataclasses.dataclass(frozen=True)
class ConvCall:
    """A convolution.

    Attributes:
      text, dtype: as in `Call`.
      transposed: whether it is a transposed convolution.
      batch, spatial, features, window, out_features: sizes.
      stride, dilation: one for each spatial axis.
      padding: "SAME", "VALID", or a pair for each spatial axis; of the convolution that is transposed, for a transposed
        one.
      groups: of features.
      channels_last: whether the layout is NHWC and not NCHW.
    """

    text: str
    dtype: str
    transposed: bool
    batch: int
    spatial: tuple[int, ...]
    features: int
    window: tuple[int, ...]
    out_features: int
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    padding: str | tuple[tuple[int, int], ...]
    groups: int
    channels_last: bool

    passes = _PASSES
    total = tuple(each.name for each in _PASSES)
    one_call_a_program = False

    @property
    def dimension_numbers(self) -> tuple[str, str, str]:
        axes = "DHW"[3 - len(self.spatial) :]
        layout = f"N{axes}C" if self.channels_last else f"NC{axes}"
        return layout, f"{axes}IO" if self.channels_last else f"OI{axes}", layout

    @property
    def extents(self) -> tuple[int, ...]:
        """The sizes of the dilated window."""
        return tuple(map(dilated_size, self.window, self.dilation))

    @property
    def dilated_pads(self) -> tuple[tuple[int, int], ...]:
        """Of a transposed convolution, the padding of the dilated input."""
        n = len(self.spatial)
        padding = (self.padding,) * n if isinstance(self.padding, str) else self.padding
        return tuple(map(transpose_padding, self.extents, self.stride, padding))

    @property
    def pads(self) -> tuple[tuple[int, int], ...]:
        """The padding of the convolution, or of the convolution that is transposed."""
        if self.transposed:
            pairs = zip(self.extents, self.dilated_pads, strict=True)
            return tuple((extent - 1 - low, extent - 1 - high) for extent, (low, high) in pairs)
        if isinstance(self.padding, str):
            return tuple(lax.padtype_to_pads(self.spatial, self.extents, self.stride, self.padding))
        return self.padding

    @property
    def out_spatial(self) -> tuple[int, ...]:
        if self.transposed:
            sizes = zip(self.spatial, self.stride, self.extents, self.pads, strict=True)
            return tuple((n - 1) * stride + extent - sum(pads) for n, stride, extent, pads in sizes)
        return tuple(map(output_size, self.spatial, self.window, self.stride, self.pads, self.dilation))

    def operands(self) -> list[jax.ShapeDtypeStruct]:
        """x, w and the cotangent of y."""

        def activations(sizes: tuple[int, ...], features: int) -> tuple[int, ...]:
            return (self.batch, *sizes, features) if self.channels_last else (self.batch, features, *sizes)

        features = self.features // self.groups, self.out_features
        w = (*self.window, *features) if self.channels_last else (*features[::-1], *self.window)
        x, y = activations(self.spatial, self.features), activations(self.out_spatial, self.out_features)
        return shaped((x, w, y), (self.dtype,) * 3)

    def deviations(self) -> list[float]:
        return [1, (math.prod(self.window) * self.features / self.groups) ** -0.5, 1]

    def _layer(self, x: Any, w: Any) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
        """The op of jaxgrad and its arguments."""
        settings: dict[str, Any] = {"rhs_dilation": self.dilation, "dimension_numbers": self.dimension_numbers}
        if self.groups > 1:
            settings["feature_group_count"] = self.groups
        if self.transposed:
            return conv_transpose, (x, w, self.stride, self.dilated_pads), settings
        return conv_general_dilated, (x, w, self.stride, self.pads), settings

    def on_jaxgrad(self, x: Any, w: Any) -> Any:
        op, arguments, settings = self._layer(x, w)
        return op(*arguments, **settings)

    def on_xla(self, x: Any, w: Any) -> Any:
        op, arguments, settings = self._layer(x, w)
        if op is conv_general_dilated:
            return lax.conv_general_dilated(*arguments, **settings)
        if self.groups == 1:
            return lax.conv_transpose(*arguments, **settings)
        ones = (1,) * len(self.spatial)  # lax.conv_transpose has no groups
        return lax.conv_general_dilated(x, w, ones, self.dilated_pads, lhs_dilation=self.stride, **settings)

    def explanation(self) -> Explanation:
        x, w, _ = self.operands()
        op, arguments, settings = self._layer(x, w)
        return explain(op, *arguments, **settings)
