"""NaN and infinity propagate as in the reference, and into no other row or step."""

from __future__ import annotations

import gru_references
import numpy as np
import pytest
from backends import GRU
from gru_cases import Case, make_inputs
from gru_running import DIFFERENTIABLE, values_and_gradients
from tolerances import tolerance

BACKENDS = GRU

# More rows than a block of the kernel: the NaN has neighbors in its own block and in others.
SETTINGS = [
    Case(T=5, B=19, I=3, H=5, sequence_lens=False, reset=False),
    Case(T=5, B=9, I=3, H=5, direction="reverse", linear_before_reset=True),
    Case(T=4, B=9, I=2, H=17, direction="bidirectional", clip=0.6),
    Case(T=1, B=3, I=2, H=17, linear_before_reset=True, sequence_lens=False),
    Case(T=1, B=3, I=2, H=5, sequence_lens=False, clip=0.6),
]


def _check(backend, case, inputs, cotangents):
    """Compares NaNs, infinities and finite values with the reference."""
    actual = values_and_gradients(backend, inputs, cotangents, case.settings)
    expected = gru_references.row_by_row(inputs, cotangents, **case.settings)
    pairs = {"y": (actual[0], expected[0]), "y_h": (actual[1], expected[1])}
    pairs |= {
        f"the gradient of {name}": (getattr(actual[2], name), getattr(expected[2], name))
        for name in DIFFERENTIABLE
        if getattr(inputs, name) is not None
    }
    for name, (found, desired) in pairs.items():
        np.testing.assert_array_equal(np.isnan(found), np.isnan(desired), err_msg=f"NaNs of {name}")
        atol = tolerance("float32", desired, case.terms, backend)
        np.testing.assert_allclose(found, desired, rtol=0, atol=atol, err_msg=name)
    return pairs


@pytest.mark.parametrize("case", SETTINGS, ids=str)
def test_nan_in_x_reaches_its_own_row_only(backend, case):
    inputs, cotangents = make_inputs(case, "float32")
    if case.sequence_lens:
        inputs = inputs._replace(sequence_lens=np.maximum(inputs.sequence_lens, 1))
    t, row = (0 if case.T == 1 else 2), case.B - 2
    if inputs.sequence_lens is not None:
        inputs.sequence_lens[row] = case.T - 1
    inputs.x[t, row, 1] = np.nan
    pairs = _check(backend, case, inputs, cotangents)
    others = np.arange(case.B) != row
    assert np.isfinite(pairs["y"][0][:, :, others]).all()
    assert np.isfinite(pairs["the gradient of x"][0][:, others]).all()
    assert np.isnan(pairs["y"][0][t, :, row]).all()
    assert np.isnan(pairs["the gradient of w"][0]).all()


@pytest.mark.parametrize("case", SETTINGS, ids=str)
@pytest.mark.parametrize("gate", ["update", "reset", "candidate"])
@pytest.mark.parametrize("where", ["w", "r", "b"])
def test_nan_in_a_parameter(backend, case, gate, where):
    inputs, cotangents = make_inputs(case, "float32")
    row = ("update", "reset", "candidate").index(gate) * case.H + 1
    getattr(inputs, where)[(0, row) if where == "b" else (0, row, 0)] = np.nan
    _check(backend, case, inputs, cotangents)


@pytest.mark.parametrize("case", SETTINGS, ids=str)
def test_nan_in_the_initial_state(backend, case):
    inputs, cotangents = make_inputs(case, "float32")
    inputs.initial_h[0, 1, 0] = np.nan
    _check(backend, case, inputs, cotangents)


@pytest.mark.parametrize("H", [17, 300])
@pytest.mark.parametrize("linear_before_reset", [False, True])
def test_an_infinite_state_that_others_forget(backend, linear_before_reset, H):
    """The state of one unit stays infinite, and those of the others stay finite: nothing but a product of a unit reads
    it, for example no zero that a kernel adds to the units."""
    case = Case(T=3, B=2, I=2, H=H, linear_before_reset=linear_before_reset).bare().replace(initial_h=True)
    inputs, cotangents = make_inputs(case, "float32")
    unit = H // 2
    inputs.initial_h[0, 1, unit] = np.inf
    inputs.r[0, :H, unit] = -1.0  # z is 0, but for the unit itself 1
    inputs.r[0, unit, unit] = 1.0
    inputs.r[0, H : 2 * H, unit] = 1.0
    pairs = _check(backend, case, inputs, cotangents)
    assert np.isinf(pairs["y"][0][:, 0, 1, unit]).all()
    assert np.isfinite(np.delete(pairs["y"][0], unit, axis=-1)).all()


@pytest.mark.parametrize("linear_before_reset", [False, True])
def test_nan_in_the_recurrent_weights_meets_a_state_of_zeros(backend, linear_before_reset):
    case = Case(T=1, B=2, I=3, H=5, linear_before_reset=linear_before_reset).bare()
    inputs, cotangents = make_inputs(case, "float32")
    inputs.r[0, 2, 3] = np.nan
    pairs = _check(backend, case, inputs, cotangents)
    assert np.isnan(pairs["y"][0]).any()


@pytest.mark.parametrize("case", SETTINGS, ids=str)
@pytest.mark.parametrize("cotangent", ["y", "y_h"])
def test_nan_in_the_cotangent(backend, case, cotangent):
    inputs, cotangents = make_inputs(case, "float32")
    if case.sequence_lens:
        inputs.sequence_lens[0] = case.T
    getattr(cotangents, cotangent)[..., 0, 1] = np.nan
    pairs = _check(backend, case, inputs, cotangents)
    assert np.isfinite(pairs["y"][0]).all()
    assert np.isfinite(pairs["the gradient of x"][0][:, 1:]).all()


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("case", SETTINGS[:3], ids=str)
def test_infinite_weights(backend, case, sign):
    """Gates of exactly 0 and 1: no NaN from exp(inf) / exp(inf)."""
    inputs, cotangents = make_inputs(case, "float32")
    inputs.w[0, :: case.H + 1, 1] = sign * np.inf
    pairs = _check(backend, case, inputs, cotangents)
    assert np.isfinite(pairs["y"][0]).all()


@pytest.mark.parametrize("size", [50.0, 1e4, 1e30])
@pytest.mark.parametrize("linear_before_reset", [False, True])
def test_saturated_gates(backend, size, linear_before_reset):
    case = Case(T=3, B=4, I=3, H=9, linear_before_reset=linear_before_reset)
    inputs, cotangents = make_inputs(case, "float32")
    inputs = inputs._replace(x=(size * inputs.x).astype(np.float32))
    actual = values_and_gradients(backend, inputs, cotangents, case.settings, requested=("r", "b", "initial_h"))
    expected = gru_references.values_and_gradients(inputs, cotangents, **case.settings)
    np.testing.assert_allclose(actual[0], expected[0], rtol=0, atol=1e-5)
    for name in ("r", "b", "initial_h"):
        np.testing.assert_allclose(getattr(actual[2], name), getattr(expected[2], name), rtol=0, atol=1e-4)
