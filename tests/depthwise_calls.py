"""Depthwise convolutions, and GPUs, that tests of the emulated CUDA kernels run."""

from __future__ import annotations

import dataclasses
from functools import reduce

import numpy as np

from jaxgrad._src.conv.call.geometry import ConvGeometry
from jaxgrad._src.conv.call.problem import ConvProblem

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


# That tensor cores multiply on an H200 if their elements have 16 bits.
LARGE_WINDOWS = {
    "13x11": DepthwiseCall(4, (33, 40), 48, (13, 11), padding=((6, 6), (5, 4))),
    "31x29": DepthwiseCall(4, (30, 21), 24, (31, 29), padding=((15, 15), (14, 14)), relu=True),
    "21x21": DepthwiseCall(2, (29, 28), 40, (21, 21), padding=10),
    "7x7": DepthwiseCall(8, (112, 112), 64, (7, 7), padding=3),
    "9x9": DepthwiseCall(32, (28, 28), 200, (9, 9), padding=4),
    "9x9, small": DepthwiseCall(32, (14, 14), 384, (9, 9), padding=4),
    "several items of a block": DepthwiseCall(9, (40, 40), 1040, (13, 13), padding=6),
}


def direct_sum(call, pass_name, array, w, bias=None, skipped_axes=()):
    """A forward pass or an input gradient, one product after the other, in float64; with a bias, also relu.

    Args:
      call: the convolution.
      pass_name: "forward", or "input_gradient".
      array: x or dy, [batch, *spatial, channels].
      w: [*window, channels].
      bias: [channels].
      skipped_axes: spatial axes along which padding is left out. Along the others it is multiplied as zeros, and the
        product with an infinite weight is NaN.
    """
    n = len(call.spatial)
    padded = np.pad(np.asarray(array, np.float64), ((0, 0), *((0, 1),) * n, (0, 0)))  # element -1 is a zero
    sizes = call.out_spatial if pass_name == "forward" else call.spatial
    result = np.zeros((call.batch, *sizes, call.channels))
    with np.errstate(invalid="ignore"):  # of an infinite number by zero
        for tap in np.ndindex(*call.window):
            found = [_elements(call, pass_name, axis, tap[axis]) for axis in range(n)]
            taken = np.ix_(range(call.batch), *(elements for elements, _ in found), range(call.channels))
            products = padded[taken] * np.asarray(w[tap], np.float64)
            counts = [used & (elements >= 0) if i in skipped_axes else used for i, (elements, used) in enumerate(found)]
            result += np.where(reduce(np.multiply.outer, counts)[..., None], products, 0)
        return result if bias is None else np.maximum(result + np.asarray(bias, np.float64), 0)


def _elements(call, pass_name, axis, tap):
    """For each result along an axis: the element that a tap multiplies, -1 for padding, and whether there is a product.

    In an input gradient with a stride, most results depend on some of the taps only.
    """
    stride, offset = call.strides[axis], tap * call.dilation[axis] - call.padding[axis][0]
    if pass_name == "forward":
        elements, size = np.arange(call.out_spatial[axis]) * stride + offset, call.spatial[axis]
        used = np.full(elements.shape, True)
    else:
        elements, rest = np.divmod(np.arange(call.spatial[axis]) - offset, stride)
        size, used = call.out_spatial[axis], rest == 0
    return np.where((elements >= 0) & (elements < size), elements, -1), used
