"""Sequence lengths and sizes of zero: the padding is never read, and its results are zero."""

from __future__ import annotations

import gru_references
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from backends import GRU
from gru_cases import Case, fill_padding, is_padding, make_inputs
from gru_running import DIFFERENTIABLE, values_and_gradients
from tolerances import DTYPES, assert_results_close

BACKENDS = GRU

SETTINGS = [
    Case(T=6, B=5, I=3, H=4, direction=direction, linear_before_reset=linear_before_reset)
    for direction, linear_before_reset in (("forward", False), ("bidirectional", True), ("reverse", False))
]


@pytest.mark.parametrize("case", SETTINGS, ids=str)
@pytest.mark.parametrize("padding", [np.nan, np.inf, 1e30])
def test_results_do_not_depend_on_the_padding(backend, case, padding):
    inputs, cotangents = make_inputs(case, "float32")
    y, y_h, gradients = values_and_gradients(backend, fill_padding(inputs, padding), cotangents, case.settings)
    unfilled = values_and_gradients(backend, inputs, cotangents, case.settings)
    assert_results_close((y, y_h, gradients), unfilled, dtype="float32", terms=case.terms, backend=backend)
    past = is_padding(inputs)
    assert past.any()
    assert not past.all()
    np.testing.assert_array_equal(gradients.x[past], 0)
    np.testing.assert_array_equal(np.moveaxis(y, 2, 1)[past], 0)


@pytest.mark.parametrize("case", SETTINGS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_of_length_zero_returns_its_initial_state(backend, case, dtype):
    inputs, cotangents = make_inputs(case, dtype)
    _, y_h, gradients = values_and_gradients(backend, inputs, cotangents, case.settings)
    empty = inputs.sequence_lens == 0
    assert empty.any()
    np.testing.assert_array_equal(y_h[:, empty], inputs.initial_h[:, empty])
    np.testing.assert_array_equal(gradients.initial_h[:, empty], cotangents.y_h[:, empty])
    np.testing.assert_array_equal(gradients.x[:, empty], 0)


@pytest.mark.parametrize("case", SETTINGS, ids=str)
def test_cotangents_of_the_padding_are_ignored(backend, case):
    inputs, cotangents = make_inputs(case, "float32")
    inputs = inputs._replace(sequence_lens=np.array([6, 2, 0, 3, 1], np.int32))
    past = np.moveaxis(np.broadcast_to(is_padding(inputs)[..., None, None], (6, 5, case.D, 4)), 2, 1)
    others = cotangents._replace(y=np.where(past, 100 * cotangents.y, cotangents.y))
    first, second = (values_and_gradients(backend, inputs, c, case.settings)[2] for c in (cotangents, others))
    for name in DIFFERENTIABLE:
        np.testing.assert_array_equal(getattr(first, name), getattr(second, name), err_msg=name)


@pytest.mark.parametrize("case", SETTINGS, ids=str)
def test_full_lengths_match_absent_lengths(backend, case):
    inputs, cotangents = make_inputs(case, "float32")
    full, absent = (inputs._replace(sequence_lens=lens) for lens in (np.full(5, 6, np.int32), None))
    with_lengths, without = (values_and_gradients(backend, i, cotangents, case.settings) for i in (full, absent))
    assert_results_close(with_lengths, without, dtype="float32", terms=case.terms, backend=backend)


@pytest.mark.parametrize("case", SETTINGS, ids=str)
def test_a_row_does_not_depend_on_the_lengths_of_others(backend, case):
    inputs, cotangents = make_inputs(case, "float32")
    lens = np.array([3, 6, 0, 2, 5], np.int32)
    others = np.array([3, 1, 4, 0, 6], np.int32)
    (y, y_h, g), (y_too, y_h_too, g_too) = (
        values_and_gradients(backend, inputs._replace(sequence_lens=n), cotangents, case.settings)
        for n in (lens, others)
    )
    np.testing.assert_allclose(y[:, :, 0], y_too[:, :, 0], rtol=0, atol=1e-6)
    np.testing.assert_allclose(y_h[:, 0], y_h_too[:, 0], rtol=0, atol=1e-6)
    np.testing.assert_allclose(g.x[:, 0], g_too.x[:, 0], rtol=0, atol=2e-6)
    np.testing.assert_allclose(g.initial_h[:, 0], g_too.initial_h[:, 0], rtol=0, atol=2e-6)


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int16, np.uint32, np.int64, np.uint64])
@pytest.mark.parametrize("kind", ["numpy", "jax"])
def test_lengths_of_every_integer_dtype(backend, dtype, kind):
    inputs, _ = make_inputs(SETTINGS[0], "float32")
    expected = backend.gru(*backend.put(inputs))
    lens = inputs.sequence_lens.astype(dtype)
    found = backend.gru(*backend.put(inputs)._replace(sequence_lens=lens if kind == "numpy" else backend.put(lens)))
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_array_equal(a, b)


def test_lengths_as_a_list(backend):
    inputs, _ = make_inputs(SETTINGS[0], "float32")
    put = backend.put(inputs)
    found, expected = (backend.gru(*put._replace(sequence_lens=n)) for n in (inputs.sequence_lens.tolist(), inputs[4]))
    np.testing.assert_array_equal(found[0], expected[0])


@pytest.mark.parametrize("lens", [(7, 0, 3, -1, 6), (2**40 + 2, 0, 3, -(2**40) + 1, 6)], ids=["near", "beyond_int32"])
def test_traced_lengths_out_of_range_are_clamped(backend, lens):
    """tests/gru/test_errors.py tests the error of the CPU kernel."""
    if backend.implementation == "cpu":
        pytest.skip("the CPU kernel raises an error")
    inputs, cotangents = make_inputs(SETTINGS[1], "float32")
    outside = inputs._replace(sequence_lens=np.array(lens, np.int64))
    within = inputs._replace(sequence_lens=np.array([6, 0, 3, 0, 6], np.int32))
    found, expected = (values_and_gradients(backend, i, cotangents, SETTINGS[1].settings) for i in (outside, within))
    assert_results_close(found, expected, dtype="float32", terms=SETTINGS[1].terms, backend=backend)


@pytest.mark.parametrize("case", SETTINGS, ids=str)
@pytest.mark.parametrize("given", [True, False], ids=["all", "bare"])
def test_an_empty_batch(backend, case, given):
    case = (case if given else case.bare()).replace(B=0)
    inputs, cotangents = make_inputs(case, "float32")
    y, y_h, gradients = values_and_gradients(backend, inputs, cotangents, case.settings)
    assert y.shape == (6, case.D, 0, 4)
    assert y_h.shape == (case.D, 0, 4)
    for name, gradient in gradients._asdict().items():
        if gradient is not None:
            np.testing.assert_array_equal(gradient, np.zeros_like(getattr(inputs, name)), err_msg=name)


@pytest.mark.parametrize("case", SETTINGS, ids=str)
@pytest.mark.parametrize("given", [True, False], ids=["all", "bare"])
def test_zero_time_steps(backend, case, given):
    case = (case if given else case.bare()).replace(T=0)
    inputs, cotangents = make_inputs(case, "float32")
    y, y_h, gradients = values_and_gradients(backend, inputs, cotangents, case.settings)
    assert y.shape == (0, case.D, 5, 4)
    np.testing.assert_array_equal(y_h, inputs.initial_h if given else np.zeros((case.D, 5, 4)))
    for name in ("x", "w", "r", *(("b",) if given else ())):
        np.testing.assert_array_equal(getattr(gradients, name), np.zeros_like(getattr(inputs, name)), err_msg=name)
    if given:
        np.testing.assert_array_equal(gradients.initial_h, cotangents.y_h)
        np.testing.assert_array_equal(gradients.reset_h, np.zeros_like(inputs.reset_h))


def test_new_lengths_do_not_recompile(backend):
    """One compiled program serves all lengths, and its gradients depend on them."""
    case = SETTINGS[1]
    inputs, _ = make_inputs(case, backend.widest)
    put = backend.put(inputs)

    @jax.jit
    def gradient(x, sequence_lens):
        return jax.grad(
            lambda x: jnp.sum(backend.gru(*put._replace(x=x, sequence_lens=sequence_lens), **case.settings)[0] ** 2)
        )(x)

    for lens in ([6, 6, 6, 6, 6], [0, 1, 2, 3, 4]):
        lens = np.array(lens, np.int32)
        found = gradient(put.x, backend.put(lens))
        y, _, _ = gru_references.numpy_forward(inputs._replace(sequence_lens=lens), **case.settings)
        cotangents = make_inputs(case, backend.widest)[1]._replace(y=2 * y, y_h=None)
        _, _, expected = gru_references.values_and_gradients(
            inputs._replace(sequence_lens=lens), cotangents, **case.settings
        )
        np.testing.assert_allclose(found, expected.x, rtol=0, atol=backend.atol(1e-13))
    assert gradient._cache_size() == 1
