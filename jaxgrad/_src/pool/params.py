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
            jax.core.max_dim(0, (size + low + high - (window - 1) * dilation - 1) // stride + 1)
            for size, window, stride, (low, high), dilation in zip(
                self.spatial(x_shape), self.shape, self.strides, self.padding, self.dilation, strict=True
            )
        )
        return self.with_spatial(x_shape, windows)

    def with_spatial(self, shape: tuple[Any, ...], spatial: tuple[Any, ...]) -> tuple[Any, ...]:
        """A shape with other spatial sizes."""
        if self.channels_last:
            return *shape[: -self.ndim - 1], *spatial, shape[-1]
        return *shape[: -self.ndim], *spatial

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
      op: "max_pool" or "avg_pool".
      window: the windows.
      spatial: the spatial sizes of x.
      candidates: by pass, what may run it.
      divisor: of the sums of "avg_pool".
    """

    op: str
    window: Window
    spatial: tuple[Any, ...]
    candidates: tuple[tuple[str, Candidates], ...]
    divisor: int = 1

    def candidates_of(self, pass_name: str) -> Candidates:
        return dict(self.candidates)[pass_name]

    def problem(self, x: jax.Array | jax.ShapeDtypeStruct) -> PoolProblem:
        """The problem of an array like x, y or a derivative, whose batch `vmap` or a mesh may have changed."""
        shape = self.window.with_spatial(x.shape, self.spatial)
        return PoolProblem(self.op, shape, np.dtype(x.dtype), self.window, self.divisor)


@dataclasses.dataclass(frozen=True)
class PoolProblem:
    """A pooling call as the backends are asked about it.

    Attributes:
      op: "max_pool" or "avg_pool".
      shape: the shape of x.
      dtype: the dtype of x.
      window: the windows.
      divisor: of the sums of "avg_pool".
    """

    op: str
    shape: tuple[int, ...]
    dtype: np.dtype
    window: Window
    divisor: int = 1

    def text(self, pass_name: str, platform: str) -> str:
        """The text of a call in a tuning, with its derivatives: all passes run on one implementation."""
        w = self.window
        channels = "last" if w.channels_last else "first"
        x = f"{short_dtype(self.dtype)}[{','.join(map(str, self.window.canonical(self.shape)))}]"
        padding = " ".join(f"{low},{high}" for low, high in w.padding)
        words = {"window": w.shape, "strides": w.strides, "dilation": w.dilation}
        sizes = " ".join(f"{name}={'x'.join(map(str, values))}" for name, values in words.items())
        return f"{self.op} x={x} {sizes} padding={padding} channels_{channels}"

    @property
    def size(self) -> int:
        """The number of elements of x."""
        return math.prod(self.shape)
