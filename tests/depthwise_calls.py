"""Depthwise convolutions, and GPUs, that tests of the emulated CUDA kernels run."""

from __future__ import annotations

import dataclasses

from jaxgrad._src.conv.geometry import ConvGeometry
from jaxgrad._src.conv.problem import ConvProblem

# Compute capability, multiprocessors, bytes of shared memory per block and per multiprocessor.
H200 = (90, 132, 232448, 233472)
FEW_HOPPER = (90, 2, *H200[2:])  # multiprocessors of an H200
SMALL = (86, 5, 101376, 102400)


@dataclasses.dataclass(frozen=True)
class DepthwiseCall:
    """A depthwise convolution of [batch, *spatial, channels]. An integer stands for that value on every axis."""

    batch: int
    spatial: tuple[int, ...]
    channels: int
    window: tuple[int, ...]
    strides: int | tuple[int, ...] = 1
    dilation: int | tuple[int, ...] = 1
    padding: int | tuple[tuple[int, int], ...] = 0
    dtype: str = "float32"
    taps_last: bool = False
    relu: bool = False
    gpu: tuple[int, ...] = H200

    def __post_init__(self):
        for name, one in (("strides", self.strides), ("dilation", self.dilation), ("padding", (self.padding,) * 2)):
            if not isinstance(getattr(self, name), tuple):
                object.__setattr__(self, name, (one,) * len(self.spatial))

    @property
    def out_spatial(self) -> tuple[int, ...]:
        axes = zip(self.spatial, self.window, self.strides, self.dilation, self.padding, strict=True)
        return tuple((n + sum(pads) - (k - 1) * d - 1) // s + 1 for n, k, s, d, pads in axes)

    @property
    def problem(self) -> ConvProblem:
        n = len(self.spatial)
        last = (0, n + 1, *range(1, n + 1))
        weights = tuple(range(n + 2)) if self.taps_last else (n + 1, n, *range(n))
        axes = self.strides, self.padding, self.dilation, self.channels, self.spatial, self.window
        return ConvProblem(
            ConvGeometry(last, weights, last, *axes), self.batch, self.channels, self.channels, self.dtype
        )
