"""Which reading of a convolution is the fastest, where several passes compute it: conv/read/readings.py.

A pass is fast where its operands have the layouts that its kernels expect, and these are the layouts in which JAX
writes the pass. The limits here are for CPUs with AVX-512.
"""

from __future__ import annotations

import math
from collections.abc import Sequence


def is_written_as_weight_gradient(lhs_spec: Sequence[int]) -> bool:
    """Whether JAX has written a convolution as a weight gradient.

    Layouts have the batch before the features. JAX swaps the two axes of lhs in a weight gradient.
    """
    batch, feature = lhs_spec[:2]
    return feature < batch


def is_written_as_input_gradient(lhs_spec: Sequence[int], rhs_spec: Sequence[int]) -> bool:
    """Whether a convolution with unit strides is read as an input gradient, and not as a forward pass.

    Both kernels are as fast, but one of them reverses the weights first. JAX writes input gradients with reversed
    weights, which are reversed again here, so that XLA drops both. The order of the weights' feature axes shows who
    wrote the convolution: models have input features first in channels-last layouts (HWIO), and last in others (OIHW).
    """
    channels_last = lhs_spec[1] == len(lhs_spec) - 1
    out_first = rhs_spec[0] < rhs_spec[1]
    return out_first == channels_last


def prefers_window(window: Sequence[int], out_spatial: Sequence[int], num_problems: int) -> bool:
    """Whether a weight gradient is computed by its window, which is dy, as another pass.

    The kernels of the weight gradient loop over the elements of the result for each position of dy, those of the other
    passes the other way round: they are faster where the result has more elements, as for a 5x5 window over 2x2
    positions. Where it has only a few more, the weight gradient is as fast or faster. It is also faster for independent
    problems, as in per-example gradients, which the other passes compute as groups.
    """
    return num_problems == 1 and 2 * math.prod(out_spatial) > 3 * math.prod(window)


def prefers_weight_gradient(window: Sequence[int], out_spatial: Sequence[int]) -> bool:
    """Whether a forward pass is computed as a weight gradient, which is faster for windows with far more elements than
    the result has positions."""
    return math.prod(window) >= 8 * math.prod(out_spatial)


def worth_measuring(window: Sequence[int], out_spatial: Sequence[int], as_weight_gradient: bool) -> bool:
    """Whether a reading may be the fastest although the pass is written as another one.

    The kernels of a weight gradient loop over the result for each element of the window, those of the other passes the
    other way round. They are fast where the inner loop is the longer one.
    """
    positions, elements = math.prod(out_spatial), math.prod(window)
    return positions <= elements if as_weight_gradient else elements <= positions


def prefers_product_of_patches(window: Sequence[int], out_spatial: Sequence[int], lhs_spatial: Sequence[int]) -> bool:
    """Whether a weight gradient of windows that do not overlap is read as such.

    Its matrix product reads an element of lhs for each position of the window and of the result. With a dilation larger
    than the result, most of them are padding.
    """
    return math.prod(window) * math.prod(out_spatial) <= 2 * math.prod(lhs_spatial)
