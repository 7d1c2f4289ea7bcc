"""`clip`: values and gradients, and a gradient of exactly zero for every clipped gate."""

from __future__ import annotations

import gru_references
import numpy as np
import pytest
from backends import GRU
from gru_cases import Case, fill_padding, make_inputs
from gru_running import values_and_gradients
from tolerances import DTYPES, EPS, assert_results_close

BACKENDS = GRU


def _clear_of_the_bounds(case: Case, dtype: str) -> Case:
    """The case with a seed for which no gate is so close to the bound that rounding could clip it."""
    for seed in range(500):
        if gru_references.is_clear_of_the_bounds(case.replace(seed=seed), dtype):
            return case.replace(seed=seed)
    raise AssertionError("no seed keeps every gate clear of the bounds")


SETTINGS = [
    Case(T=3, B=2, I=3, H=3, direction="forward", clip=0.5),
    Case(T=3, B=2, I=3, H=3, direction="forward", linear_before_reset=True, clip=0.5),
    Case(T=2, B=2, I=3, H=2, direction="bidirectional", clip=0.4, sequence_lens=False),
    Case(T=2, B=2, I=3, H=2, direction="bidirectional", linear_before_reset=True, clip=0.4, b=False, reset=False),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", SETTINGS, ids=str)
def test_values_and_gradients(backend, case, dtype):
    case = _clear_of_the_bounds(case, dtype)
    inputs, cotangents = make_inputs(case, dtype)
    _, _, before = gru_references.numpy_forward(inputs, **case.settings)
    assert 0.1 < np.mean(np.abs(before) > case.clip) < 0.9
    actual = values_and_gradients(backend, fill_padding(inputs, np.nan), cotangents, case.settings)
    expected = gru_references.values_and_gradients(inputs, cotangents, **case.settings)
    assert_results_close(actual, expected, dtype=dtype, terms=case.terms, backend=backend)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("linear_before_reset", [False, True])
def test_larger_sizes(backend, dtype, linear_before_reset):
    case = Case(6, 9, 20, 33, linear_before_reset=linear_before_reset, clip=0.5)
    case = _clear_of_the_bounds(case, dtype)
    inputs, cotangents = make_inputs(case, dtype)
    actual = values_and_gradients(backend, fill_padding(inputs, np.nan), cotangents, case.settings)
    expected = gru_references.values_and_gradients(inputs, cotangents, **case.settings)
    assert_results_close(actual, expected, dtype=dtype, terms=case.terms, backend=backend)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("linear_before_reset", [False, True])
def test_gradients_are_zero_for_exactly_the_clipped_gates(backend, dtype, sign, linear_before_reset):
    """Of two inputs one unit in the last place below and above the bound, only the second is clipped.

    With one time step, no state and unit inputs, the pre-activations of the three gates are the weights.
    """
    clip = 0.5
    weights = sign * np.array([clip * (1 - EPS[dtype] / 2), clip, clip * (1 + EPS[dtype])]).astype(DTYPES[dtype])
    assert (np.diff(weights.astype(np.float64)) != 0).all()
    H = 3
    w = np.tile(weights, 3)[None, :, None]
    inputs = gru_references.Inputs(
        np.ones((1, 1, 1), DTYPES[dtype]), w, np.zeros((1, 3 * H, H), DTYPES[dtype]), None, None,
        np.full((1, 1, H), 0.25, DTYPES[dtype]),
    )  # fmt: skip
    if linear_before_reset:  # the reset gate's gradient needs a recurrent term in the candidate
        b = np.zeros((1, 6 * H))
        b[0, 2 * H : 3 * H], b[0, 5 * H :] = -0.25 * sign, 0.25 * sign
        inputs = inputs._replace(b=b.astype(DTYPES[dtype]))
    cotangents = gru_references.Cotangents(np.ones((1, 1, 1, H), DTYPES[dtype]), None)
    settings = {"direction": "forward", "linear_before_reset": linear_before_reset, "clip": clip}
    y, _, gradients = values_and_gradients(backend, inputs, cotangents, settings)
    z, reset, candidate = gradients.w.astype(np.float64).reshape(3, H)
    assert np.isfinite(y.astype(np.float64)).all()
    assert z[0] != 0
    np.testing.assert_array_equal(z[1:], 0)
    if linear_before_reset:
        assert reset[0] != 0
        np.testing.assert_array_equal(reset[1:], 0)
    else:
        assert candidate[0] != 0
        np.testing.assert_array_equal(candidate[1:], 0)


@pytest.mark.parametrize("clip", [1e-3, 3, 40, np.float32(0.5), np.float16(0.5), np.int64(1)], ids=repr)
def test_every_type_of_clip(backend, clip):
    case = Case(clip=float(clip), linear_before_reset=True)
    inputs, cotangents = make_inputs(case, backend.widest)
    actual = values_and_gradients(backend, inputs, cotangents, {**case.settings, "clip": clip})
    expected = gru_references.values_and_gradients(inputs, cotangents, **case.settings)
    assert_results_close(actual, expected, dtype=backend.widest, terms=case.terms, backend=backend)


def test_an_infinite_clip_matches_no_clip(backend):
    inputs, cotangents = make_inputs(Case(), backend.widest)
    bounded, unbounded = (
        values_and_gradients(backend, inputs, cotangents, {"clip": clip}) for clip in (float("inf"), None)
    )
    np.testing.assert_array_equal(bounded[0], unbounded[0])
    np.testing.assert_array_equal(bounded[2].r, unbounded[2].r)
