"""The weight gradient of grouped convolutions on XLA, written tap by tap: right, and not slow."""

from __future__ import annotations

import time

import jax
import numpy as np
import pytest
from conv_cases import ConvCase, cotangent, make_conv_inputs
from conv_references import lax_conv, numpy_conv, numpy_weight_gradient
from conv_running import conv, run, terms
from targets import XLA
from tolerances import assert_close

CASES = [
    ConvCase(groups=3, strides=(2, 3), padding=((1, 2), (0, 3)), rhs_dilation=(2, 1), bias=False),
    ConvCase(spatial=(17,), window=(4,), groups=5, features=1, out_features=2, padding=((3, 0),), bias=False),
    ConvCase(spatial=(5, 4, 6), window=(2, 3, 1), groups=2, padding=((0, 1),) * 3, strides=(1, 2, 2), bias=False),
    # More taps than are written out one by one.
    ConvCase(spatial=(16, 11), window=(13, 7), groups=2, padding=((6, 5), (3, 4)), strides=(3, 1), bias=False),
    ConvCase(spatial=(9, 9, 9), window=(5, 5, 3), groups=2, features=1, rhs_dilation=(2, 1, 1), bias=False),
]


def _settings(case):
    ones, none = (1,) * case.n, ((0, 0),) * case.n
    return case.strides or ones, case.padding or none, case.rhs_dilation or ones, case.groups


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_against_numpy(case, dtype):
    inputs = make_conv_inputs(case, dtype)
    lhs, rhs = (np.asarray(a, np.float64) for a in inputs[:2])
    expected = numpy_conv(lhs, rhs, *_settings(case))
    dy = cotangent(expected.shape, dtype)
    dw = numpy_weight_gradient(lhs, rhs.shape, np.asarray(dy, np.float64), *_settings(case))
    found = run(conv(XLA, **case.settings), inputs, dy, ("rhs",))
    assert_close(found.y, expected, dtype=dtype, terms=terms(inputs, dy), name="y")
    assert_close(found.rhs, dw, dtype=dtype, terms=terms(inputs, dy), name="dw")


def test_the_numpy_reference_is_a_convolution():
    """NumPy against `jax.lax`, so that the two references stand for one another."""
    for case in CASES:
        inputs = make_conv_inputs(case, "float64")
        expected = run(lax_conv(case), inputs, cotangent(lax_conv(case)(*inputs).shape, "float64"))
        dy = cotangent(expected.y.shape, "float64")
        np.testing.assert_allclose(numpy_conv(*inputs[:2], *_settings(case)), expected.y, rtol=0, atol=1e-12)
        dw = numpy_weight_gradient(inputs.lhs, inputs.rhs.shape, dy, *_settings(case))
        np.testing.assert_allclose(dw, expected.rhs, rtol=0, atol=1e-11)


def _seconds(case):
    inputs = make_conv_inputs(case)
    op = conv(XLA, **case.settings)
    y, pullback = jax.vjp(lambda rhs: op(inputs.lhs, rhs), inputs.rhs)
    pullback = jax.jit(pullback)
    pullback(y)[0].block_until_ready()
    times = []
    for _ in range(7):
        start = time.perf_counter()
        pullback(y)[0].block_until_ready()
        times.append(time.perf_counter() - start)
    return min(times)


@pytest.mark.parametrize("layout", [None, ("NHWC", "HWIO", "NHWC")], ids=["first", "last"])
def test_not_slower_by_an_order_than_without_groups(layout):
    """16 groups of 4 features against 16 features without groups: the same arithmetic.

    XLA's own gradient is hundreds of times slower in groups than without.
    """
    sizes = {"spatial": (28, 28), "window": (3, 3), "padding": "SAME", "batch": 4, "bias": False, "layout": layout}
    grouped = _seconds(ConvCase(features=4, out_features=4, groups=16, **sizes))
    plain = _seconds(ConvCase(features=16, out_features=16, **sizes))
    assert grouped < 20 * plain, (grouped, plain)
