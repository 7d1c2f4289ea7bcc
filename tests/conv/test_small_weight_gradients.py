"""Per-example weight gradients of few multiplications run on a kernel of jaxgrad, ffi/cpu/conv/small_plan.h."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from backends import ONEDNN
from conv_cases import ConvCase, cotangent, make_conv_inputs
from conv_references import in_float64, lax_conv
from conv_running import conv, terms
from tolerances import assert_close

from jaxgrad._src.conv.kernels import onednn

KERNEL = "jaxgrad, small weight gradient"
EXAMPLES = 3
LAST = ("NHWC", "HWIO", "NHWC")
CASES = {
    "one feature": ConvCase(
        spatial=(8, 8), window=(3, 3), batch=1, features=1, out_features=8, padding="SAME", layout=LAST
    ),
    "strides": ConvCase(spatial=(8, 7), window=(3, 2), features=8, out_features=4, strides=(2, 3), layout=LAST),
    "asymmetric padding": ConvCase(padding=((2, 0), (1, 3)), features=5, out_features=3, layout=LAST),
    "dilation": ConvCase(spatial=(9, 11), window=(2, 3), rhs_dilation=(3, 2), padding=((4, 1), (0, 2))),
    "window on padding": ConvCase(spatial=(2, 3), window=(5, 1), padding=((4, 5), (0, 0)), layout=LAST),
    "features first": ConvCase(features=4, out_features=20, strides=(1, 2)),
    "mixed layouts": ConvCase(layout=("HNWC", "OHIW", "CWHN"), features=3, out_features=17),
    "many features": ConvCase(spatial=(4, 4), window=(1, 1), batch=1, features=40, out_features=70, layout=LAST),
    "one axis": ConvCase(spatial=(13,), window=(4,), strides=(2,), padding=((1, 2),), features=2, out_features=33),
    "three axes": ConvCase(spatial=(3, 4, 5), window=(2, 1, 3), batch=1, padding="SAME"),
}


def _gradients(case, inputs, examples, dy):
    """The gradients of the weights and of the bias for each of several examples."""

    def of_one(lhs, dy):
        _, pullback = jax.vjp(lambda rhs, bias: conv(ONEDNN, **case.settings)(lhs, rhs, bias), inputs.rhs, inputs.bias)
        return pullback(dy)

    return jax.jit(jax.vmap(of_one))(examples, dy)


@pytest.fixture
def kernels(monkeypatch):
    """The names of the kernels of the weight gradients that a test traces."""
    found = []
    plan_of = onednn.onednn_plan

    def recorded(pass_name, *arguments):
        plan = plan_of(pass_name, *arguments)
        if pass_name == "weight_gradient":
            found.append(plan.kernel)
        return plan

    monkeypatch.setattr(onednn, "onednn_plan", recorded)
    return found


@pytest.mark.each_value
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_values(case, dtype, kernels):
    drawn = [make_conv_inputs(case.replace(seed=seed), dtype) for seed in range(EXAMPLES)]
    inputs = drawn[0]
    y = jax.eval_shape(lax_conv(case), *inputs)
    dy = np.stack([cotangent(y.shape, dtype, seed) for seed in range(EXAMPLES)])
    found = _gradients(case, inputs, np.stack([one.lhs for one in drawn]), dy)
    assert kernels[-1] == KERNEL  # the others are of selections
    for i, one in enumerate(drawn):
        expected = in_float64(lax_conv(case), inputs._replace(lhs=one.lhs), dy[i])
        for name, gradients in zip(("rhs", "bias"), found, strict=True):
            assert_close(gradients[i], getattr(expected, name), dtype=dtype, terms=terms(inputs, y), name=name)


@pytest.mark.parametrize("name", ["strides", "asymmetric padding"])
def test_non_finite_values(name):
    """A NaN or an infinity reaches the gradients of its own example. Padding is multiplied as elements of x are."""
    case = CASES[name]
    inputs = make_conv_inputs(case)
    y = jax.eval_shape(lax_conv(case), *inputs)
    x, dy = np.stack([inputs.lhs] * EXAMPLES), np.stack([cotangent(y.shape, "float32")] * EXAMPLES)
    x[1, 0, 2, 3, 4], dy[2, 1, 0, 0, 2] = np.nan, np.inf
    found = _gradients(case, inputs, x, dy)
    for i in range(EXAMPLES):
        padded = np.pad(x[i], ((0, 0), *(case.padding or ((0, 0),) * 2), (0, 0)))
        _, pullback = jax.vjp(lax_conv(case.replace(padding=None)), padded, inputs.rhs, inputs.bias)
        expected = pullback(dy[i])[1:]
        for actual, desired in zip(found, expected, strict=True):
            np.testing.assert_array_equal(np.isfinite(actual[i]), np.isfinite(desired))
            np.testing.assert_array_equal(np.isnan(actual[i]), np.isnan(desired))


@pytest.mark.parametrize(
    "case",
    [
        CASES["one feature"].replace(spatial=(60, 60)),  # many elements of x
        ConvCase(spatial=(12, 12), window=(5, 5), padding="SAME", features=4, layout=LAST),  # of packed windows
        ConvCase(spatial=(8, 8), window=(1, 1), features=64, out_features=128, layout=LAST),  # many multiplications
        ConvCase((2000,), (3,), 1, features=1, out_features=16, layout=("NWC", "WIO", "NWC")),  # few rows
        CASES["strides"].replace(groups=2),
    ],
)
def test_other_problems_run_on_onednn(case, kernels):
    inputs = make_conv_inputs(case)
    y = jax.eval_shape(lax_conv(case), *inputs)
    _gradients(case, inputs, np.stack([inputs.lhs] * 2), np.zeros((2, *y.shape), np.float32))
    assert kernels
    assert KERNEL not in kernels


def test_a_single_problem_runs_on_onednn(kernels):
    case = CASES["one feature"]
    inputs = make_conv_inputs(case)
    y = jax.eval_shape(lax_conv(case), *inputs)
    _gradients(case, inputs, inputs.lhs[None], np.zeros((1, *y.shape), np.float32))
    assert kernels
    assert KERNEL not in kernels
