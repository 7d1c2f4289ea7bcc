"""The floating-point operations of a convolution, as XLA counts them: two for each product with an element of x."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np


def count_flops(
    batch: int,
    features: int,
    x_spatial: Sequence[int],
    w_spatial: Sequence[int],
    y_spatial: Sequence[int],
    window_strides: Sequence[int],
    padding: Sequence[tuple[int, int]],
    lhs_dilation: Sequence[int],
    rhs_dilation: Sequence[int],
) -> int:
    """Returns 2 times the number of products. Products with padding, and with zeros between elements, do not count.

    All three passes of a convolution have the same products.

    Args:
      batch: the batch size of y.
      features: the features of w: output features times input features of one group.
      x_spatial, w_spatial, y_spatial: the spatial sizes.
      window_strides, padding, lhs_dilation, rhs_dilation: as in `jax.lax.conv_general_dilated`.
    """
    axes = zip(x_spatial, w_spatial, y_spatial, window_strides, padding, lhs_dilation, rhs_dilation, strict=True)
    products = math.prod(_products(*axis) for axis in axes)
    return 2 * batch * features * products


def _products(x: int, w: int, y: int, stride: int, padding: tuple[int, int], lhs_dilation: int, dilation: int) -> int:
    """The number of triples (i, k, o) of positions in x, w and y with i * lhs_dilation = o * stride + offset of k."""
    offsets = np.arange(w, dtype=np.int64) * dilation - padding[0]
    common = math.gcd(stride, lhs_dilation)
    period = lhs_dilation // common  # of the positions o that meet an element of x
    first = (-(offsets // common) * pow(stride // common, -1, period)) % period
    low = np.maximum(-(offsets // stride), 0)  # the first o with o * stride + offset >= 0
    low += (first - low) % period
    high = np.minimum(((x - 1) * lhs_dilation - offsets) // stride, y - 1)
    counts = np.maximum((high - low) // period + 1, 0)
    return int(counts[offsets % common == 0].sum())
