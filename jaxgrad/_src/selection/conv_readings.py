"""Which reading of a convolution is tried first, where several passes compute it."""

from __future__ import annotations

import math
from collections.abc import Sequence

_MOST_POSITIONS = 64


def prefers_weight_gradient(window: Sequence[int], out_spatial: Sequence[int]) -> bool:
    """Whether a convolution is read as a weight gradient.

    The kernels of the other passes loop over the positions of the window for each position of the result, those of the
    weight gradient the other way round. They are fast where the inner loop is the short one.
    """
    return math.prod(out_spatial) < math.prod(window)


def prefers_matrix_product(window: Sequence[int]) -> bool:
    """Whether a convolution whose window covers all of x is one matrix product, and not the weight gradient of 1x1."""
    return math.prod(window) <= _MOST_POSITIONS
