"""Which reading of a convolution is tried first, where several passes compute it.

Measured in float32 on a CPU with AVX-512. `conv.equation` describes the readings.
"""

from __future__ import annotations

import math
from collections.abc import Sequence


def prefers_weight_gradient(window: Sequence[int], out_spatial: Sequence[int]) -> bool:
    """Whether a convolution is read as a weight gradient, and not by its window.

    The kernels of the other passes loop over the window for each position of the result, those of the weight gradient
    the other way round: 1.3 to 4 times as fast where the result has fewer positions than the window, and 2 to 20 times
    as slow where it has more.
    """
    return math.prod(out_spatial) < math.prod(window)


def prefers_product_of_patches(window: Sequence[int], out_spatial: Sequence[int], lhs_spatial: Sequence[int]) -> bool:
    """Whether a weight gradient of windows that do not overlap is read as such.

    Its matrix product reads an element of lhs for each position of the window and of the result. With a dilation larger
    than the result, most of them are padding.
    """
    return math.prod(window) * math.prod(out_spatial) <= 2 * math.prod(lhs_spatial)


def prefers_matrix_product(lhs_spec: Sequence[int], rhs_spec: Sequence[int]) -> bool:
    """Whether a convolution whose window covers all of lhs is computed as a matrix product.

    It is where the batch of lhs comes first and the features and spatial axes of each operand are next to each other,
    so that no operand is transposed. The weight gradient of a 1x1 window is such a convolution too, with the features
    as its batch; the transposes take as long as the matrix product saves over oneDNN.
    """
    contiguous = all(max(axes) - min(axes) == len(axes) - 1 for axes in (lhs_spec[1:], rhs_spec[1:]))
    return lhs_spec[0] == 0 and contiguous


def prefers_input_gradient(lhs_spec: Sequence[int], rhs_spec: Sequence[int]) -> bool:
    """Whether a convolution with unit strides is read as an input gradient, and not as a forward pass.

    Both kernels are as fast, but one of them reverses the weights first. JAX writes input gradients with reversed
    weights, which are reversed again here, so that XLA drops both. The order of the weights' feature axes shows who
    wrote the convolution: models have input features first in channels-last layouts (HWIO), and last in others (OIHW).
    """
    channels_last = lhs_spec[1] == len(lhs_spec) - 1
    out_first = rhs_spec[0] < rhs_spec[1]
    return out_first == channels_last
