"""Weight gradients of grouped convolutions and of independent problems on XLA: values and speed."""

from __future__ import annotations

import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from backends import XLA, Backend
from conv_cases import ConvCase, cotangent, make_conv_inputs
from conv_references import lax_conv, numpy_conv, numpy_weight_gradient
from conv_running import calls, conv, run, terms
from tolerances import assert_close

from jaxgrad._src.conv.on_xla import taps
from jaxgrad._src.conv.read.convolution import LaxArguments
from jaxgrad._src.conv.read.op_call import read

CASES = [
    ConvCase(groups=3, strides=(2, 3), padding=((1, 2), (0, 3)), rhs_dilation=(2, 1), bias=False),
    ConvCase(spatial=(17,), window=(4,), groups=5, features=1, out_features=2, padding=((3, 0),), bias=False),
    ConvCase(spatial=(5, 4, 6), window=(2, 3, 1), groups=2, padding=((0, 1),) * 3, strides=(1, 2, 2), bias=False),
    # More window positions than the unrolled loop supports.
    ConvCase(spatial=(16, 11), window=(13, 7), groups=2, padding=((6, 5), (3, 4)), strides=(3, 1), bias=False),
    ConvCase(spatial=(9, 9, 9), window=(5, 5, 3), groups=2, features=1, rhs_dilation=(2, 1, 1), bias=False),
]


def _settings(case):
    ones, none = (1,) * case.n, ((0, 0),) * case.n
    return case.strides or ones, case.padding or none, case.rhs_dilation or ones, case.groups


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_matches_numpy(case, dtype):
    inputs = make_conv_inputs(case, dtype)
    lhs, rhs = (np.asarray(a, np.float64) for a in inputs[:2])
    expected = numpy_conv(lhs, rhs, *_settings(case))
    dy = cotangent(expected.shape, dtype)
    dw = numpy_weight_gradient(lhs, rhs.shape, np.asarray(dy, np.float64), *_settings(case))
    found = run(conv(XLA, **case.settings), inputs, dy, ("rhs",))
    assert_close(found.y, expected, dtype=dtype, terms=terms(inputs, dy), name="y")
    assert_close(found.rhs, dw, dtype=dtype, terms=terms(inputs, dy), name="dw")


def test_numpy_reference_matches_lax():
    """Verifies the NumPy reference with `jax.lax`."""
    for case in CASES:
        inputs = make_conv_inputs(case, "float64")
        expected = run(lax_conv(case), inputs, cotangent(lax_conv(case)(*inputs).shape, "float64"))
        dy = cotangent(expected.y.shape, "float64")
        np.testing.assert_allclose(numpy_conv(*inputs[:2], *_settings(case)), expected.y, rtol=0, atol=1e-12)
        dw = numpy_weight_gradient(inputs.lhs, inputs.rhs.shape, dy, *_settings(case))
        np.testing.assert_allclose(dw, expected.rhs, rtol=0, atol=1e-11)


@pytest.mark.parametrize("gathered_bytes", [0, 4000, 1 << 30])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_weight_gradients_of_independent_problems(case, gathered_bytes):
    drawn = [make_conv_inputs(case.replace(seed=seed)) for seed in range(3)]
    x, w = np.stack([one.lhs for one in drawn]), drawn[0].rhs
    dys = [cotangent(numpy_conv(one.lhs, w, *_settings(case)).shape, "float32", seed=i) for i, one in enumerate(drawn)]
    geometry = read(LaxArguments(**case.settings), x[0], w, False).pass_call.geometry
    found = taps._of_groups(geometry, None, gathered_bytes, jnp.asarray(x), jnp.asarray(np.stack(dys)))
    for i, (one, dy) in enumerate(zip(drawn, dys, strict=True)):
        expected = numpy_weight_gradient(one.lhs.astype(np.float64), w.shape, dy, *_settings(case))
        np.testing.assert_allclose(found[i], expected, rtol=0, atol=2e-5 * np.abs(expected).max())


@pytest.mark.parametrize(("platform", "groups"), [("cpu", 4), ("cuda", 1), ("cuda", 4)])
def test_independent_problems_are_batched_matrix_products(platform, groups):
    """A batched matrix product over all window positions on a GPU, one per window position on a CPU."""
    case = ConvCase(batch=4, window=(3, 3), features=8, out_features=8, groups=groups, padding="SAME", bias=False)
    implementation = "xla" if platform == "cpu" else None
    op = conv(Backend(implementation, platform), **case.settings)

    def gradients(lhs, rhs, dy):
        return jax.vmap(lambda lhs, dy: jax.vjp(lambda rhs: op(lhs, rhs), rhs)[1](dy)[0])(lhs, dy)

    lhs, rhs, _ = make_conv_inputs(case)
    dy = np.zeros((9, *op(lhs, rhs).shape), np.float32)
    lowered = jax.jit(gradients).trace(np.stack([lhs] * 9), rhs, dy).lower(lowering_platforms=(platform,))
    text = lowered.as_text()
    assert not any(calls(text).values())
    assert "stablehlo.convolution" not in text
    assert text.count("stablehlo.dot_general") == (1 if platform == "cuda" else 9)


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
def test_groups_cost_less_than_an_order_of_magnitude(layout):
    """16 groups of 4 features have the same number of operations as 16 features without groups.

    The default gradient of XLA is hundreds of times slower with groups.
    """
    sizes = {"spatial": (28, 28), "window": (3, 3), "padding": "SAME", "batch": 4, "bias": False, "layout": layout}
    grouped = _seconds(ConvCase(features=4, out_features=4, groups=16, **sizes))
    plain = _seconds(ConvCase(features=16, out_features=16, **sizes))
    assert grouped < 20 * plain, (grouped, plain)
