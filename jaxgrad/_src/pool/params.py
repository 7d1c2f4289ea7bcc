"""The static arguments of a pooling call, and its description for the backends."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import numpy as np

from jaxgrad._src.choice.candidates import Candidates
from jaxgrad._src.native.ffi import short_dtype

Pairs = tuple[tuple[int, int], ...]


@dataclasses.dataclass(frozen=True)
class Window:
    """The windows of a call, with one element for each spatial axis.

    Attributes:
      shape: the sizes.
      strides: the distances between windows.
      padding: how many elements are added before and after an axis.
      dilation: the distances between the elements of a window.
      channels_last: whether the channels are the last axis of x. Otherwise they stand before the spatial axes.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    padding: Pairs
    dilation: tuple[int, ...]
    channels_last: bool

    @property
    def ndim(self) -> int:
        """The number of spatial axes."""
        return len(self.shape)

    def spatial(self, shape: tuple[Any, ...]) -> tuple[Any, ...]:
        """The spatial sizes of an array like x."""
        return shape[-self.ndim - 1 : -1] if self.channels_last else shape[-self.ndim :]

    def y_shape(self, x_shape: tuple[Any, ...]) -> tuple[Any, ...]:
        """The shape of y."""
        windows = tuple(
            max(0, (size + low + high - (window - 1) * dilation - 1) // stride + 1)
            for size, window, stride, (low, high), dilation in zip(
                self.spatial(x_shape), self.shape, self.strides, self.padding, self.dilation, strict=True
            )
        )
        if self.channels_last:
            return *x_shape[: -self.ndim - 1], *windows, x_shape[-1]
        return *x_shape[: -self.ndim], *windows

    def canonical(self, shape: tuple[Any, ...]) -> tuple[Any, ...]:
        """The shape [outer, spatial..., channels] of an array like x. Channels before the spatial axes are a
        part of the outer axis."""
        if self.channels_last:
            return math.prod(shape[: -self.ndim - 1]), *self.spatial(shape), shape[-1]
        return math.prod(shape[: -self.ndim]), *self.spatial(shape), 1

    def of_all_axes(self, values: tuple[Any, ...], other: Any, ndim: int) -> tuple[Any, ...]:
        """`values` for the spatial axes of an array of rank `ndim`, and `other` for its other axes."""
        others = (other,) * (ndim - self.ndim - 1)
        return (*others, *values, other) if self.channels_last else (*others, other, *values)


@dataclasses.dataclass(frozen=True)
class PoolParams:
    """The static arguments of one call.

    Attributes:
      window: the windows.
      candidates: by pass, what may run it.
    """

    window: Window
    candidates: tuple[tuple[str, Candidates], ...]

    def candidates_of(self, pass_name: str) -> Candidates:
        return dict(self.candidates)[pass_name]


@dataclasses.dataclass(frozen=True)
class PoolProblem:
    """A pooling call as the backends are asked about it.

    Attributes:
      shape: the shape of x.
      dtype: the dtype of x.
      window: the windows.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    window: Window

    @classmethod
    def of(cls, x: jax.Array, window: Window) -> PoolProblem:
        """The problem of an operand x."""
        return cls(tuple(x.shape), np.dtype(x.dtype), window)

    def text(self, pass_name: str, platform: str) -> str:
        """The text of a call in a tuning, with its derivatives: all passes run on one implementation."""
        w = self.window
        channels = "last" if w.channels_last else "first"
        x = f"{short_dtype(self.dtype)}[{','.join(map(str, self.window.canonical(self.shape)))}]"
        padding = " ".join(f"{low},{high}" for low, high in w.padding)
        words = {"window": w.shape, "strides": w.strides, "dilation": w.dilation}
        sizes = " ".join(f"{name}={'x'.join(map(str, values))}" for name, values in words.items())
        return f"max_pool x={x} {sizes} padding={padding} channels_{channels}"

    @property
    def size(self) -> int:
        """The number of elements of x."""
        return math.prod(self.shape)
