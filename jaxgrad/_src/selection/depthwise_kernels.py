"""Which CPU kernels run a depthwise convolution: jaxgrad's own, or those of oneDNN.

Measured on one core of a CPU with AVX-512.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

_SMALL_WINDOW = 9
_LARGE_SPAN = 4096  # of half the positions that the kernels copy at once (ffi/cpu/depthwise/workers.h)


def prefers_own_kernel(
    pass_name: str, window: Sequence[int], strides: Sequence[int], dilation: Sequence[int], features_first: bool
) -> bool:
    """Whether jaxgrad's own kernel is the faster one for a pass of a depthwise convolution.

    oneDNN has good kernels for two spatial dimensions: forward passes, and gradients without strides or dilation. With
    features first, it is slower for strides. Its weight gradients are good for windows up to 3x3 only. In one and three
    dimensions its kernels are 3 to 100 times slower. But with features first, jaxgrad's kernels copy all that a window
    spans for each position, where that is much.
    """
    span = math.prod((size - 1) * step + 1 for size, step in zip(window, dilation, strict=True))
    if features_first and span > _LARGE_SPAN:
        return False
    if len(window) != 2:
        return True
    dilated = max(dilation) > 1
    strided = max(strides) > 1
    if pass_name == "forward":
        return features_first and (strided or dilated)
    if pass_name == "input_gradient":
        return strided or dilated
    return dilated or (strided and features_first) or math.prod(window) > _SMALL_WINDOW
