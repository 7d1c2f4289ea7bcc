"""Values and gradients of `jaxgrad.gru` against the float64 reference: settings, dtypes and sizes."""

from __future__ import annotations

import gru_references
import jax
import numpy as np
import pytest
from backends import GRU
from gru_cases import OPTIONAL, Case, Cotangents, make_inputs
from gru_running import DIFFERENTIABLE, check, values_and_gradients
from thorough import one_in
from tolerances import DTYPES, assert_results_close, rounds_products

BACKENDS = GRU

DIRECTIONS = ("forward", "reverse", "bidirectional")
SETTINGS = [
    Case(T=6, B=3, I=5, H=7, direction=direction, linear_before_reset=linear_before_reset)
    for direction in DIRECTIONS
    for linear_before_reset in (False, True)
]
ABSENT = [case.bare() for case in SETTINGS]
PARTLY_ABSENT = [  # each set of absent arrays with two settings
    Case(T=4, B=5, I=2, H=3, direction=DIRECTIONS[(i + j) % 3], linear_before_reset=bool((i + j) % 2), **given)
    for i, given in enumerate(
        {name: bool(bits >> k & 1) for k, name in enumerate(OPTIONAL)}
        for bits in (1, 2, 3, 4, 5, 6, 10, 13, 24, 25, 28)
    )
    for j in (0, 1)
]
SIZES = [  # T, B, I, H: at most one dimension is a multiple of the vector length
    (1, 1, 1, 1),
    (1, 9, 3, 3),
    (2, 1, 5, 1),
    (9, 3, 1, 17),
    (4, 19, 7, 33),
    (3, 2, 17, 48),
    (5, 9, 50, 50),
    (3, 4, 21, 130),
]
LARGER_SIZES = [(70, 33, 40, 100), (200, 1, 64, 64), (37, 20, 130, 150), (13, 64, 16, 96)]
LARGER = [
    *(Case(*sizes) for sizes in LARGER_SIZES),
    *(Case(*sizes, direction="reverse", linear_before_reset=True) for sizes in LARGER_SIZES),
]


@pytest.mark.parametrize("case", [*SETTINGS, *ABSENT, *one_in(2, PARTLY_ABSENT)], ids=str)
def test_every_setting(backend, case):
    check(backend, case, backend.widest)


@pytest.mark.thorough_on_xla
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("linear_before_reset", [False, True])
def test_every_dtype(backend, dtype, linear_before_reset):
    check(backend, Case(9, 7, 10, 19, "bidirectional", linear_before_reset), dtype)


@pytest.mark.thorough_on_xla
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("linear_before_reset", [False, True])
def test_every_dtype_without_the_optional_arrays(backend, dtype, linear_before_reset):
    case = Case(7, 10, 19, 9, "reverse", linear_before_reset).bare()
    check(backend, case, dtype)


@pytest.mark.thorough_on_xla
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_every_size(backend, sizes):
    check(backend, Case(*sizes), "float32")


@pytest.mark.thorough_on_xla
@pytest.mark.parametrize(("case", "dtype"), [*((case, "float32") for case in LARGER), (LARGER[2], "bfloat16")], ids=str)
def test_larger_sizes(backend, case, dtype):
    check(backend, case, dtype, optimized=True)


@pytest.mark.thorough_on_xla
@pytest.mark.parametrize("linear_before_reset", [False, True])
@pytest.mark.parametrize("read", ["y", "y_h"])
def test_gradients_of_a_loss_of_one_result(backend, linear_before_reset, read):
    case = Case(direction="bidirectional", linear_before_reset=linear_before_reset)
    inputs, cotangents = make_inputs(case, "float32")
    only = Cotangents(**{**dict.fromkeys(Cotangents._fields), read: getattr(cotangents, read)})
    actual = values_and_gradients(backend, inputs, only, case.settings)
    expected = gru_references.values_and_gradients(inputs, only, **case.settings)
    assert_results_close(actual, expected, dtype="float32", terms=case.terms, backend=backend)


def test_a_loss_of_no_result_has_zero_gradients(backend):
    inputs, _ = make_inputs(Case(), "float32")
    _, _, gradients = values_and_gradients(backend, inputs, Cotangents(None, None), {})
    for name in DIFFERENTIABLE:
        np.testing.assert_array_equal(getattr(gradients, name), np.zeros_like(getattr(inputs, name)))


@pytest.mark.thorough_on_xla
@pytest.mark.parametrize("dtype", DTYPES)
def test_results_match_with_and_without_differentiation(backend, dtype):
    case = Case(direction="reverse", linear_before_reset=True, clip=0.7)
    inputs, cotangents = make_inputs(case, dtype)
    y_too, y_h_too, _ = values_and_gradients(backend, inputs, cotangents, case.settings)
    y, y_h = jax.jit(lambda inputs: backend.gru(*inputs, **case.settings))(backend.put(inputs))
    # Not bitwise equal: XLA may fuse the two programs differently.
    both = (np.asarray(y), np.asarray(y_h), gru_references.Inputs(*[None] * 3))
    assert_results_close(both, (y_too, y_h_too, None), dtype=dtype, terms=case.terms, backend=backend)


def test_bidirectional_matches_each_direction_alone(backend):
    case = Case(T=7, B=4, I=3, H=5, direction="bidirectional")
    inputs, _ = make_inputs(case, "float32")
    y, y_h = backend.gru(*backend.put(inputs), direction="bidirectional")
    atol = 4e-3 if rounds_products(backend) else 1e-6  # XLA may round the operands of one of the products alone
    for d, direction in enumerate(("forward", "reverse")):
        one = backend.put(inputs._replace(**{n: getattr(inputs, n)[d : d + 1] for n in DIFFERENTIABLE if n != "x"}))
        y_alone, y_h_alone = backend.gru(*one, direction=direction)
        np.testing.assert_allclose(y[:, d], y_alone[:, 0], rtol=0, atol=atol)
        np.testing.assert_allclose(y_h[d], y_h_alone[0], rtol=0, atol=atol)
