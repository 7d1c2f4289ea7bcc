"""Resets of the state: where they apply, the gradients that they stop, and NaN in the states that they replace.

Case draws resets for the other test modules too.
"""

from __future__ import annotations

import gru_references
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from backends import GRU
from gru_cases import Case, Inputs, is_padding, make_inputs
from gru_running import DIFFERENTIABLE, values_and_gradients
from thorough import thorough_after
from tolerances import assert_results_close

import jaxgrad

BACKENDS = GRU

T = 6
SETTINGS = [
    Case(T, B=5, I=3, H=9, direction="forward"),
    Case(T, B=5, I=3, H=4, direction="reverse", linear_before_reset=True),
    Case(T, B=9, I=3, H=17, direction="bidirectional"),
]
every_setting = pytest.mark.parametrize("case", SETTINGS, ids=str)


def _first_steps(inputs: Inputs, direction: str) -> np.ndarray:
    """Boolean [T, B]: True for the first step that a direction takes in each row."""
    first = np.zeros(inputs.reset.shape, bool)
    rows = np.flatnonzero(inputs.sequence_lens)
    first[inputs.sequence_lens[rows] - 1 if direction == "reverse" else 0, rows] = True
    return first


# Boolean [T, B] of a direction's inputs.
PLACES = {
    "nowhere": lambda inputs, direction: np.zeros_like(inputs.reset),
    "everywhere": lambda inputs, direction: np.ones_like(inputs.reset),
    "first_steps": _first_steps,
    "all_but_first_steps": lambda inputs, direction: ~_first_steps(inputs, direction),
    "past_the_lengths": lambda inputs, direction: is_padding(inputs),
}


def _with_resets_at(place: str, case: Case, dtype: str):
    inputs, cotangents = make_inputs(case, dtype)
    return inputs._replace(reset=PLACES[place](inputs, case.direction)), cotangents


@every_setting
@pytest.mark.parametrize("place", PLACES)
def test_every_place(backend, case, place):
    inputs, cotangents = _with_resets_at(place, case, backend.widest)
    actual = values_and_gradients(backend, inputs, cotangents, case.settings)
    expected = gru_references.values_and_gradients(inputs, cotangents, **case.settings)
    assert_results_close(actual, expected, dtype=backend.widest, terms=case.terms, backend=backend)


@pytest.mark.thorough_on_xla
@every_setting
@pytest.mark.parametrize("place", ["nowhere", "past_the_lengths"])
def test_resets_without_effect_match_absent_resets(backend, case, place):
    inputs, cotangents = _with_resets_at(place, case, "float32")
    found = values_and_gradients(backend, inputs, cotangents, case.settings)
    np.testing.assert_array_equal(found[2].reset_h, 0)
    absent = values_and_gradients(backend, inputs._replace(reset=None, reset_h=None), cotangents, case.settings)
    for actual, expected in zip((*found[:2], *found[2][:6]), (*absent[:2], *absent[2][:6]), strict=True):
        if expected is not None:
            np.testing.assert_allclose(actual, expected, rtol=0, atol=0 if backend.implementation == "cpu" else 1e-5)


@pytest.mark.thorough_on_xla
@every_setting
def test_a_reset_at_the_first_step_replaces_the_initial_state(backend, case):
    case = case.replace(direction="forward")
    inputs, cotangents = _with_resets_at("first_steps", case, "float32")
    found = values_and_gradients(backend, inputs, cotangents, case.settings)
    moved = inputs._replace(
        initial_h=np.where((inputs.sequence_lens > 0)[:, None], inputs.reset_h, inputs.initial_h),
        reset=None,
        reset_h=None,
    )
    y, y_h, gradients = values_and_gradients(backend, moved, cotangents, case.settings)
    taken = inputs.sequence_lens > 0
    assert 0 < taken.sum() < case.B
    np.testing.assert_allclose(found[0], y, rtol=0, atol=1e-6)
    np.testing.assert_allclose(found[1], y_h, rtol=0, atol=1e-6)
    np.testing.assert_array_equal(found[2].initial_h[:, taken], 0)
    np.testing.assert_array_equal(found[2].initial_h[:, ~taken], cotangents.y_h[:, ~taken])
    np.testing.assert_allclose(found[2].reset_h[:, taken], gradients.initial_h[:, taken], rtol=0, atol=1e-5)
    np.testing.assert_array_equal(found[2].reset_h[:, ~taken], 0)


@pytest.mark.parametrize("direction", ["forward", "reverse"])
@pytest.mark.parametrize("linear_before_reset", [False, True])
def test_a_reset_of_all_rows_splits_the_sequence(backend, direction, linear_before_reset):
    """Values and gradients are those of two calls, the second of which starts with `reset_h`."""
    case = Case(T, B=3, I=4, H=5, direction=direction, linear_before_reset=linear_before_reset, sequence_lens=False)
    inputs, cotangents = backend.put(make_inputs(case, backend.widest))
    t = 2  # the reset, and so the first step of the second call
    reset = np.zeros((T, case.B), bool)
    reset[t] = True
    first, second = (slice(t), slice(t, T)) if direction == "forward" else (slice(t + 1, T), slice(t + 1))

    def together(given):
        return backend.gru(*inputs._replace(**given, reset=backend.put(reset)), **case.settings)

    def apart(given):
        whole = inputs._replace(**given)
        parts = [
            backend.gru(*whole._replace(x=whole.x[steps], initial_h=h, reset=None, reset_h=None), **case.settings)
            for steps, h in ((first, whole.initial_h), (second, whole.reset_h))
        ]
        ys = [y for y, _ in parts]
        return jnp.concatenate(ys if direction == "forward" else ys[::-1]), parts[1][1]

    given = {name: getattr(inputs, name) for name in DIFFERENTIABLE}
    found, expected = (
        jax.jit(lambda given, back, f=f: (f(given), jax.vjp(f, given)[1](back)))(given, tuple(cotangents))
        for f in (together, apart)
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=backend.atol(1e-13)), found, expected)


@every_setting
def test_gradients_stop_at_a_reset(backend, case):
    """Of a loss of the last states, the inputs before the last reset have a gradient of exactly zero."""
    case = case.replace(direction="forward", sequence_lens=False)
    inputs, cotangents = make_inputs(case, "float32")
    inputs.reset[:, 1:] = False
    inputs.reset[3, 1:] = True
    inputs.reset[4:, 0] = False
    _, _, gradients = values_and_gradients(backend, inputs, cotangents._replace(y=None), case.settings)
    np.testing.assert_array_equal(gradients.x[:3, 1:], 0)
    assert (np.abs(gradients.x[3:]).max(2) > 0).all()
    np.testing.assert_array_equal(gradients.initial_h[:, 1:], 0)
    assert (np.abs(gradients.reset_h[:, 1:]).max(2) > 0).all()


@every_setting
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_replaced_initial_state_is_not_read(backend, case, value):
    inputs, cotangents = _with_resets_at("everywhere", case, "float32")
    taken = inputs.sequence_lens > 0
    filled = inputs._replace(initial_h=np.where(taken[:, None], np.float32(value), inputs.initial_h))
    found, expected = (values_and_gradients(backend, i, cotangents, case.settings) for i in (filled, inputs))
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    assert np.isfinite(found[2].r).all()


@every_setting
def test_states_that_replace_none_are_not_read(backend, case):
    inputs, cotangents = make_inputs(case, "float32")
    inputs.reset[:, 1] = False
    filled = inputs._replace(reset_h=inputs.reset_h.copy())
    filled.reset_h[:, 1] = np.nan
    found, expected = (values_and_gradients(backend, i, cotangents, case.settings) for i in (filled, inputs))
    jax.tree.map(np.testing.assert_array_equal, found, expected)


@pytest.mark.parametrize("linear_before_reset", [False, True])
@pytest.mark.parametrize("is_before", [True, False], ids=["before", "after"])
def test_nan_stays_on_its_side_of_a_reset(backend, linear_before_reset, is_before):
    """NaN in an input reaches no state after the next reset of the row, and no gradient before the last one."""
    case = Case(T, B=9, I=3, H=5, linear_before_reset=linear_before_reset, sequence_lens=False)
    inputs, cotangents = make_inputs(case, "float32")
    row, t = 4, 3
    inputs.reset[:, row] = np.arange(T) == t
    inputs.x[t - 2 if is_before else t + 1, row, 0] = np.nan
    y, y_h, gradients = values_and_gradients(backend, inputs, cotangents, case.settings)
    expected, expected_h, expected_gradients = gru_references.row_by_row(inputs, cotangents, **case.settings)
    np.testing.assert_allclose(y, expected, rtol=0, atol=1e-5)
    np.testing.assert_allclose(y_h, expected_h, rtol=0, atol=1e-5)
    for name in ("x", "initial_h", "reset_h"):
        found, desired = getattr(gradients, name), getattr(expected_gradients, name)
        np.testing.assert_allclose(found, desired, rtol=0, atol=1e-4, err_msg=name)
    others = slice(t, T) if is_before else slice(t)
    assert np.isfinite(y[others]).all()
    assert np.isfinite(gradients.x[others]).all()
    assert np.isfinite(gradients.reset_h if is_before else gradients.initial_h).all()
    assert np.isnan(y[:, 0, row]).any()
    assert np.isnan(gradients.x[:, row]).any()


@pytest.mark.thorough_on_xla
@pytest.mark.parametrize("direction", thorough_after(1, ["reverse", "forward"]))
def test_higher_derivatives_do_not_read_a_replaced_state(backend, direction):
    """Second derivatives and forward mode."""
    case = Case(T=3, B=3, I=2, H=3, direction=direction, sequence_lens=False)
    inputs = make_inputs(case, backend.widest)[0]
    inputs.reset[:, 0] = True

    @jax.jit
    def derivatives(put):
        def loss(given):
            return sum(jnp.sum(out**2) for out in backend.gru(*put._replace(**given), **case.settings))

        def penalty(given):
            return sum(jnp.sum(g**2) for g in jax.tree.leaves(jax.grad(loss)(given)))

        given = {name: getattr(put, name) for name in DIFFERENTIABLE}
        return jax.grad(penalty)(given), jaxgrad.jvp(jax.grad(loss), (given,), (given,))

    filled = inputs.initial_h.copy()
    filled[:, 0] = np.nan
    found, expected = (derivatives(backend.put(inputs._replace(initial_h=h))) for h in (filled, inputs.initial_h))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=backend.atol(1e-12)), found, expected)


@pytest.mark.parametrize("dtype", ["int8", "uint32", "float32", "bfloat16", "float64"])
@pytest.mark.parametrize("remat_every", [None, 2])
def test_numbers(dtype, remat_every):
    """As in `jnp.where`, a number is true if it is not zero, and so is NaN."""
    inputs, _ = make_inputs(SETTINGS[0], "float32")
    numbers = np.where(inputs.reset, 3, 0).astype(jnp.dtype(dtype))
    if jnp.issubdtype(numbers.dtype, jnp.floating):
        numbers[np.nonzero(inputs.reset)[0][0], np.nonzero(inputs.reset)[1][0]] = np.nan
        numbers[~inputs.reset] = -0.0
    assert 0 < inputs.reset.sum() < inputs.reset.size

    def run(reset):
        return jaxgrad.gru(*inputs[:6], reset=reset, reset_h=inputs.reset_h, remat_every=remat_every)

    jax.tree.map(np.testing.assert_array_equal, run(numbers), run(inputs.reset))
    jax.tree.map(np.testing.assert_array_equal, jax.jit(run)(numbers.tolist()), jax.jit(run)(inputs.reset))


def test_gradient_of_numbers():
    """Batches of training steps hold floating-point resets beside what is differentiated."""
    inputs, _ = make_inputs(SETTINGS[0], "float32")

    def loss(batch):
        return (jaxgrad.gru(batch["x"], inputs.w, inputs.r, reset=batch["reset"])[0] ** 2).sum()

    batch = {"x": inputs.x, "reset": inputs.reset.astype(np.float32)}
    gradient = jax.grad(loss)(batch)
    np.testing.assert_array_equal(gradient["reset"], np.zeros_like(batch["reset"]))
    expected = jax.grad(loss, allow_int=True)({**batch, "reset": inputs.reset})
    np.testing.assert_array_equal(gradient["x"], expected["x"])
    assert expected["reset"].dtype == jax.dtypes.float0
