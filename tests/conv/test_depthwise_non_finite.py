"""Infinite and NaN elements in the three passes of a depthwise convolution."""

from __future__ import annotations

import numpy as np
import pytest
from backends import CPU_KERNEL, CUDA, XLA
from conv_cases import ConvCase, ConvInputs, cotangent, make_conv_inputs
from conv_running import conv, run
from depthwise_calls import DepthwiseCall, direct_sum

BACKENDS = (CPU_KERNEL, XLA, CUDA)

CALL = DepthwiseCall(3, (15, 14), 24, (5, 3), padding=((2, 2), (1, 1)))
CASE = ConvCase(
    spatial=CALL.spatial,
    window=CALL.window,
    batch=CALL.batch,
    features=1,
    out_features=1,
    groups=CALL.channels,
    padding=CALL.padding,
    layout=("NHWC", "HWIO", "NHWC"),
    bias=False,
)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_elements_reach_what_depends_on_them_in_their_channel(backend, dtype):
    """Other results of a channel are finite, except in the weight gradient. The implementations differ where a weight
    meets padding: those that multiply it by zeros give NaN."""
    inputs = make_conv_inputs(CASE, dtype)
    x, w, dy = np.array(inputs.lhs), np.array(inputs.rhs), cotangent(CASE.shapes.lhs, dtype)
    x[0, 0, 0, 0], x[2, 14, 13, 1], dy[0, 0, 0, 2], dy[2, 14, 13, 3] = np.inf, np.nan, np.nan, np.inf
    w[0, 0, 0, 4], w[4, 2, 0, 5] = np.inf, np.nan
    found = run(conv(backend, **CASE.settings), ConvInputs(x, w), dy)
    for result, array, pass_name in ((found.y, x, "forward"), (found.lhs, dy, "input_gradient")):
        with_zeros, left_out = (direct_sum(CALL, pass_name, array, w[:, :, 0], None, axes) for axes in ((), (0, 1)))
        is_left_out = np.isnan(with_zeros) & ~np.isnan(result.astype(np.float64))
        expected = np.where(is_left_out, left_out, with_zeros)
        rounding = {"float32": 1e-5, "bfloat16": 8e-3}[dtype]
        np.testing.assert_allclose(result.astype(np.float64), expected, rtol=rounding, atol=8 * rounding)

    is_finite = np.isfinite(found.rhs[:, :, 0].astype(np.float64))
    assert is_finite[..., 4:].all()
    begin, end = np.s_[:3, :2], np.s_[2:, 1:]  # the taps that meet the first element of x, and the last
    for channel, taps in enumerate((begin, end, end, begin)):
        assert not is_finite[(*taps, channel)].any()
