"""The operations that networks are written with, independent of the library that runs them.

A network is a function `network(ops, x)`. `ops` hands each layer its parameters, in the order in which the network asks
for them. The layout of arrays is up to the library.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np

BATCH_NORM_EPSILON, LAYER_NORM_EPSILON, GROUP_NORM_EPSILON = 1e-5, 1e-6, 1e-6
GROUPS = 32


class Conv(NamedTuple):
    w: Any  # [*window, inputs of a group, C]
    bias: Any  # [C], or None


class ConvTranspose(NamedTuple):
    w: Any  # [*window, inputs, C], as jax.lax.conv_transpose takes it
    bias: Any  # [C]


class Norm(NamedTuple):
    scale: Any  # [C]
    bias: Any  # [C]


class Dense(NamedTuple):
    w: Any  # [inputs, C]
    bias: Any  # [C]


class Scale(NamedTuple):
    scale: Any  # [C]


@dataclasses.dataclass(frozen=True)
class Window:
    """A convolution's window, the same on every spatial axis.

    Attributes:
      padding: "centered", so that an odd window and a stride of 1 keep the size; "causal", as much padding, all of it
        before the first element; or "none".
    """

    size: int
    stride: int = 1
    dilation: int = 1
    groups: int = 1
    padding: str = "centered"

    @property
    def pads(self) -> tuple[int, int]:
        """Below and above, on every spatial axis."""
        reach = self.dilation * (self.size - 1)
        return {"centered": (reach // 2, reach // 2), "causal": (reach, 0), "none": (0, 0)}[self.padding]


class Ops(abc.ABC):
    """The operations of one library on the parameters of one network, for one run of it.

    Attributes:
      statistics: one entry for each batch normalization that ran; its content is up to the library.
    """

    def __init__(self, params: Iterable[Any]) -> None:
        self._params = iter(params)
        self.statistics: list[Any] = []

    def _layer(self, initial: Callable[[np.random.Generator], Any]) -> Any:
        """The next layer's parameters. `initial` draws new ones, which only initial.py uses."""
        return next(self._params)

    # Layers: `x` is followed by the number of output features where the layer chooses it.

    def conv(
        self,
        x: Any,
        features: int,
        size: int,
        *,
        bias: bool = True,
        relu: bool = False,
        gain: float = 2,
        **settings: Any,
    ) -> Any:
        """A convolution with `Window(size, **settings)`, then relu if asked for.

        The initial weights multiply the mean square of x by `gain`.
        """
        window = Window(size, **settings)

        def initial(rng: np.random.Generator) -> Conv:
            shape = (size,) * (x.ndim - 2) + (x.shape[-1] // window.groups, features)
            w = _normal(rng, shape, gain / np.prod(shape[:-1]))
            return Conv(w.astype(x.dtype), np.zeros(features, x.dtype) if bias else None)

        return self._conv(x, self._layer(initial), window, relu)

    def conv_transpose(self, x: Any, features: int, stride: int) -> Any:
        """A transposed convolution whose window equals its stride: the windows of the outputs do not overlap."""

        def initial(rng: np.random.Generator) -> ConvTranspose:
            shape = (stride,) * (x.ndim - 2) + (x.shape[-1], features)
            return ConvTranspose(_normal(rng, shape, 1 / x.shape[-1]).astype(x.dtype), np.zeros(features, x.dtype))

        return self._conv_transpose(x, self._layer(initial), stride)

    def batch_norm(self, x: Any, *, residual: Any = None, activation: str | None = "relu", scale: float = 1) -> Any:
        """Normalizes with the batch's statistics, which it appends to `statistics`; adds `residual`; applies "relu",
        "silu" or nothing."""
        return self._batch_norm(x, self._layer(lambda rng: _norm(x, np.float32, scale)), residual, activation)

    def layer_norm(self, x: Any) -> Any:
        """Over the features."""
        return self._layer_norm(x, self._layer(lambda rng: _norm(x, x.dtype)))

    def group_norm(self, x: Any, *, activation: str | None = "silu") -> Any:
        """Of `GROUPS` groups of features; applies "silu" or nothing."""
        return self._group_norm(x, self._layer(lambda rng: _norm(x, x.dtype)), activation)

    def dense(self, x: Any, features: int) -> Any:
        """Of [N, inputs]."""

        def initial(rng: np.random.Generator) -> Dense:
            w = _normal(rng, (x.shape[-1], features), 1 / x.shape[-1])
            return Dense(w.astype(x.dtype), np.zeros(features, x.dtype))

        return self._dense(x, self._layer(initial))

    def attention(self, x: Any, features: int, heads: int) -> Any:
        """Self-attention over all positions, with weights for queries, keys, values and the result, unaware of order.

        The first three have no bias: the gradient of the keys' would be nothing but rounding errors.
        """
        queries, keys, values = (self.conv(x, features, 1, gain=1, bias=False) for _ in range(3))
        return self.conv(self._attention(queries, keys, values, heads), features, 1, gain=1)

    def scale(self, x: Any, initial: float) -> Any:
        """Multiplies each feature by its own scale."""
        return self._scale(x, self._layer(lambda rng: Scale(np.full(x.shape[-1], initial, x.dtype))))

    # Each library implements these.

    @abc.abstractmethod
    def _conv(self, x: Any, layer: Conv, window: Window, relu: bool) -> Any: ...

    @abc.abstractmethod
    def _conv_transpose(self, x: Any, layer: ConvTranspose, stride: int) -> Any: ...

    @abc.abstractmethod
    def _batch_norm(self, x: Any, layer: Norm, residual: Any, activation: str | None) -> Any: ...

    @abc.abstractmethod
    def _layer_norm(self, x: Any, layer: Norm) -> Any: ...

    @abc.abstractmethod
    def _group_norm(self, x: Any, layer: Norm, activation: str | None) -> Any: ...

    @abc.abstractmethod
    def _dense(self, x: Any, layer: Dense) -> Any: ...

    @abc.abstractmethod
    def _scale(self, x: Any, layer: Scale) -> Any: ...

    @abc.abstractmethod
    def _attention(self, queries: Any, keys: Any, values: Any, heads: int) -> Any: ...

    @abc.abstractmethod
    def relu(self, x: Any) -> Any: ...

    @abc.abstractmethod
    def silu(self, x: Any) -> Any: ...

    @abc.abstractmethod
    def gelu(self, x: Any) -> Any:
        """Exact, with the error function."""

    @abc.abstractmethod
    def tanh(self, x: Any) -> Any: ...

    @abc.abstractmethod
    def sigmoid(self, x: Any) -> Any: ...

    @abc.abstractmethod
    def concatenate(self, *xs: Any) -> Any:
        """Along the features."""

    @abc.abstractmethod
    def halves(self, x: Any) -> tuple[Any, Any]:
        """Of the features."""

    @abc.abstractmethod
    def at_each_position(self, values: Any, x: Any) -> Any:
        """[N, C] as an array that broadcasts over the positions of x."""

    @abc.abstractmethod
    def time_embedding(self, x: Any, features: int) -> Any:
        """Sines and cosines of a time for each example of x, [N, features]. The times are evenly spaced below 1000."""

    @abc.abstractmethod
    def upsample(self, x: Any) -> Any:
        """Twice the size on two spatial axes, with the nearest neighbors."""

    @abc.abstractmethod
    def max_pool(self, x: Any, size: int, stride: int, padding: int = 0) -> Any: ...

    @abc.abstractmethod
    def mean(self, x: Any) -> Any:
        """Over all spatial positions, [N, C]."""


def _normal(rng: np.random.Generator, shape: tuple[int, ...], variance: float) -> np.ndarray:
    return rng.standard_normal(shape, np.float32) * np.float32(variance**0.5)


def _norm(x: Any, dtype: Any, scale: float = 1) -> Norm:
    return Norm(np.full(x.shape[-1], scale, dtype), np.zeros(x.shape[-1], dtype))
