"""The references of the GRU against each other and against finite differences."""

from __future__ import annotations

import gru_references
import jax
import numpy as np
import pytest
from gru_cases import Case, make_inputs
from gru_running import DIFFERENTIABLE
from thorough import thorough_after

SETTINGS = [
    Case(direction=direction, linear_before_reset=linear_before_reset, clip=clip, seed=5)
    for direction in ("forward", "reverse", "bidirectional")
    for linear_before_reset in (False, True)
    for clip in (None, 0.5)
]


@pytest.mark.parametrize("case", SETTINGS, ids=str)
@pytest.mark.parametrize("given", thorough_after(1, [True, False]), ids=["all", "bare"])
def test_scan_matches_numpy(case, given):
    inputs, cotangents = make_inputs(case if given else case.bare())
    y, y_h, _ = gru_references.numpy_forward(inputs, **case.settings)
    by_direction = gru_references.values_and_gradients(inputs, cotangents, **case.settings)[:2]
    traceable = jax.jit(lambda inputs: gru_references.forward(*inputs, **case.settings))(inputs)
    for found in (by_direction, traceable):
        np.testing.assert_allclose(found[0], y, rtol=0, atol=1e-14)
        np.testing.assert_allclose(found[1], y_h, rtol=0, atol=1e-14)


@pytest.mark.parametrize("case", SETTINGS, ids=str)
def test_gradients_match_finite_differences(case):
    inputs, cotangents = make_inputs(case)
    _, _, gradients = gru_references.values_and_gradients(inputs, cotangents, **case.settings)
    rng = np.random.default_rng(1)

    def loss(inputs):
        y, y_h, _ = gru_references.numpy_forward(inputs, **case.settings)
        return np.vdot(y, cotangents.y) + np.vdot(y_h, cotangents.y_h)

    for name in DIFFERENTIABLE:
        value, direction = getattr(inputs, name), rng.standard_normal(getattr(inputs, name).shape)
        step = 1e-6 / np.abs(direction).max()
        above, below = (loss(inputs._replace(**{name: value + sign * step * direction})) for sign in (1, -1))
        slope = np.vdot(getattr(gradients, name), direction)
        np.testing.assert_allclose((above - below) / (2 * step), slope, rtol=1e-6, atol=1e-7, err_msg=name)


def test_gradients_match_the_traceable_form():
    case = SETTINGS[-1].replace(T=4)
    inputs, cotangents = make_inputs(case)

    def outputs(differentiated):
        return gru_references.forward(*inputs._replace(**differentiated), **case.settings)

    arrays = {name: getattr(inputs, name) for name in DIFFERENTIABLE}
    (gradients,) = jax.jit(lambda arrays, back: jax.vjp(outputs, arrays)[1](back))(arrays, tuple(cotangents))
    _, _, by_direction = gru_references.values_and_gradients(inputs, cotangents, **case.settings)
    for name, gradient in gradients.items():
        np.testing.assert_allclose(gradient, getattr(by_direction, name), rtol=0, atol=1e-13, err_msg=name)


@pytest.mark.parametrize("case", SETTINGS[3::4], ids=str)
def test_row_by_row_results_match(case):
    inputs, cotangents = make_inputs(case)
    by_row = gru_references.row_by_row(inputs, cotangents, **case.settings)
    together = gru_references.values_and_gradients(inputs, cotangents, **case.settings)
    for found, expected in zip((*by_row[:2], *by_row[2]), (*together[:2], *together[2]), strict=True):
        if expected is not None:
            np.testing.assert_allclose(found, expected, rtol=0, atol=1e-13)
