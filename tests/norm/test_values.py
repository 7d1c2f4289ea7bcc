"""Values and gradients of batch normalization against the float64 reference: settings, dtypes and shapes."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from backends import BATCH_NORM
from batch_norm_references import (
    EPSILON,
    Case,
    Results,
    check_training,
    inference,
    make_inputs,
    plain_inference,
    plain_training,
    reference,
    skip_without_kernels,
    training,
    values_and_gradients,
)
from tolerances import DTYPES, assert_close, input_dtype

BACKENDS = BATCH_NORM

SETTINGS = [(activation, residual) for activation in (None, "relu") for residual in (False, True)]
SHAPES = [  # (shape, feature axis): channels last, first and in between
    ((2, 1), -1),
    ((300, 1), -1),
    ((257, 3), 1),
    ((40, 17), -1),
    ((33, 64), 1),
    ((1000, 130), -1),
    ((3, 300), -1),
    ((70, 513), -1),
    ((7, 5, 3, 16), 3),
    ((5, 3, 2, 4, 6), -1),
    ((2, 1000), 0),
    ((6, 7, 8), 0),
    ((4, 100, 2), -2),
    ((5, 6, 31), 1),
    ((5, 6, 32), 1),
    ((3, 7, 40, 37), 1),
    ((2, 3, 7, 7), -3),
    ((1, 4, 20000), 1),
    ((300, 2, 33), 1),
    ((9, 1, 50), 1),
]
TRIPLES = [
    ("float64", "float64", "float64"),
    *(
        (x, scale, statistics)
        for x in ("float16", "bfloat16")
        for scale in (x, "float32")
        for statistics in (x, "float32")
    ),
]


@pytest.mark.parametrize(("shape", "axis"), SHAPES, ids=str)
def test_every_shape(backend, shape, axis):
    check_training(backend, Case(shape, axis, dtypes=("float32",) * 3))


@pytest.mark.parametrize(("activation", "residual"), SETTINGS)
@pytest.mark.parametrize(("shape", "axis"), [((9, 37, 8), -1), ((3, 5, 50), 1), ((4, 67, 7), 1)], ids=str)
def test_every_setting(backend, shape, axis, activation, residual):
    check_training(backend, Case(shape, axis, residual, activation, dtypes=("float64",) * 3))


@pytest.mark.parametrize(("activation", "residual"), [("silu", True), ("gelu", False)])
@pytest.mark.parametrize(("shape", "axis"), [((9, 37, 8), -1), ((3, 5, 50), 1)], ids=str)
def test_smooth_activations(backend, shape, axis, activation, residual):
    skip_without_kernels(backend, activation)
    check_training(backend, Case(shape, axis, residual, activation, dtypes=("float64",) * 3))


@pytest.mark.parametrize("dtypes", TRIPLES, ids="-".join)
@pytest.mark.parametrize(
    ("shape", "axis", "activation", "residual"),
    [((6, 7, 5, 19), -1, None, False), ((3, 5, 9, 11), 1, "relu", False), ((2, 8, 7, 9), -1, "relu", True)],
    ids=str,
)
def test_every_dtype(backend, shape, axis, activation, residual, dtypes):
    check_training(backend, Case(shape, axis, residual, activation, dtypes))


@pytest.mark.parametrize(("shape", "axis"), [((16, 33, 40, 48), -1), ((8, 24, 70, 65), 1)], ids=str)
@pytest.mark.parametrize("dtypes", [("float32",) * 3, ("bfloat16", "float32", "float32")], ids="-".join)
def test_large_shapes_run_on_several_threads(backend, shape, axis, dtypes):
    check_training(backend, Case(shape, axis, dtypes=dtypes))


@pytest.mark.parametrize("dtype", DTYPES)
def test_default_statistics_dtype(backend, dtype):
    expected = "float64" if dtype == "float64" else "float32"
    x, ones = (np.ones(shape, input_dtype(dtype)) for shape in ((3, 2), 2))
    y, mean, var = training(backend)(*backend.put((x, ones, 0 * ones)))
    assert (y.dtype, mean.dtype, var.dtype) == (dtype, expected, expected)


def test_float16_statistics_round_only_the_returned_values(backend):
    """A variance beyond the range of float16 is returned as infinity; y is computed from the exact variance."""
    x = jnp.array([[-1000.0], [1000.0]], jnp.float16)
    one, zero = jnp.ones(1, jnp.float16), jnp.zeros(1, jnp.float16)
    y, _, var = training(backend)(*backend.put((x, one, zero)), statistics_dtype=jnp.float16)
    assert var[0] == np.inf
    np.testing.assert_array_equal(y[:, 0], [-1, 1])


@pytest.mark.parametrize("given", ["y", "mean", "var", "y-var"])
@pytest.mark.parametrize("activation", [None, "relu"])
def test_gradients_of_a_loss_of_some_results(backend, given, activation):
    case = Case((6, 5, 7), 1, residual=True, activation=activation, dtypes=("float64",) * 3)
    inputs, cotangents = make_inputs(case)
    cotangents = Results(*(c if name in given.split("-") else None for name, c in cotangents._asdict().items()))
    inputs, cotangents = backend.put((inputs, cotangents))

    def ours(x, scale, bias, residual):
        return training(backend)(x, scale, bias, residual=residual, **case.settings)

    _, gradients = values_and_gradients(ours, inputs, cotangents)
    _, expected = reference(partial(plain_training, **case.settings), inputs, cotangents)
    for actual, desired in zip(gradients, expected, strict=True):
        assert_close(actual, desired, dtype="float64", terms=case.terms)


@pytest.mark.parametrize(
    ("shape", "axis", "dtypes"),
    [
        *(((6, 7, 5, 19), -1, dtypes) for dtypes in TRIPLES),
        *((shape, axis, ("float32",) * 3) for shape, axis in [((3, 5, 9, 11), -3), ((500, 170), 1), ((50, 5, 9), 1)]),
    ],
    ids=str,
)
def test_frozen_statistics(backend, shape, axis, dtypes):
    case = Case(shape, axis, dtypes=dtypes)
    (x, scale, bias, _), cotangents = make_inputs(case)
    rng = np.random.default_rng(5)
    mean = rng.normal(0.5, 1, case.C).astype(DTYPES[dtypes[2]])
    var = rng.uniform(0.3, 2, case.C).astype(DTYPES[dtypes[2]])
    settings = {"feature_axis": axis, "epsilon": EPSILON}
    inputs, dy = (x, scale, bias, mean, var), (cotangents.y,)
    y, gradients = values_and_gradients(lambda *a: inference(backend)(*a, **settings), *backend.put((inputs, dy)))
    expected, expected_gradients = reference(partial(plain_inference, **settings), inputs, dy)
    assert_close(y, expected, dtype=dtypes[0], terms=1, name="y")
    names, of = ("x", "scale", "bias", "mean", "var"), (dtypes[0], dtypes[1], dtypes[1], dtypes[2], dtypes[2])
    for name, dtype, actual, desired in zip(names, of, gradients, expected_gradients, strict=True):
        assert_close(actual, desired, dtype=dtype, terms=case.terms, name=f"the gradient of {name}")


def test_relu_gradient_at_zero_is_zero(backend):
    """Constant channels: every normalized element is exactly zero."""
    x = backend.put(jnp.full((4, 3), 2.0))
    for residual in (None, jnp.zeros((4, 3))):
        call = lambda bias: training(backend)(x, jnp.ones(3), bias, residual=residual, activation="relu").y.sum()  # noqa: B023, E731
        np.testing.assert_array_equal(jax.grad(call)(jnp.zeros(3)), 0)
        np.testing.assert_array_equal(jax.grad(call)(jnp.full(3, 1e-3)), 4)
        np.testing.assert_array_equal(jax.grad(call)(jnp.full(3, -1e-3)), 0)
