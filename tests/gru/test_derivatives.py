"""Higher derivatives of the GRU: finite differences, Jacobians, gradients of gradients."""

from __future__ import annotations

from functools import cache

import gru_references
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from backends import GRU
from gru_cases import Case, fill_padding, is_padding, make_inputs
from gru_running import DIFFERENTIABLE as NAMES
from jax.test_util import check_grads
from thorough import thorough_after

BACKENDS = GRU

SETTINGS = [
    Case(T=4, B=2, I=3, H=3, direction="bidirectional", linear_before_reset=True),
    Case(T=4, B=3, I=2, H=3, direction="reverse"),
    Case(T=3, B=2, I=2, H=4, clip=0.8, seed=4).bare(),
]


def _as_float64(array):
    return array.astype(np.float64) if array.dtype == np.float32 else array


def _compare(backend, found, expected, atol):
    """Compares trees; `atol` holds for float64."""
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=backend.atol(atol)), found, expected)


def _split(inputs):
    """The differentiable arrays that are given, and the call in terms of them."""
    given = {name: getattr(inputs, name) for name in NAMES if getattr(inputs, name) is not None}

    def call(gru, settings):
        def outputs(differentiated):
            return gru(*inputs._replace(**differentiated), **settings)

        return outputs

    return given, call


@pytest.mark.parametrize("case", thorough_after(1, SETTINGS), ids=str)
def test_finite_differences_to_second_order(backend, case):
    if backend.widest != "float64":
        pytest.skip("finite differences need float64")
    inputs = backend.put(make_inputs(case, "float64")[0])
    given, call = _split(inputs)
    outputs = call(backend.gru, case.settings)

    @jax.jit
    def shifted(differentiated):  # the cotangents, which must not be 0 past the length of a row
        return jax.tree.map(lambda result: result + 1, outputs(differentiated))

    check_grads(shifted, (given,), order=2, modes=["rev"], rtol=1e-5, atol=1e-5)


def _gradient_of_penalty(outputs):
    """Gradients, with respect to inputs and cotangents, of a loss plus its squared gradients."""

    def loss(given, back):
        y, y_h = outputs(given)
        return jnp.vdot(y, back.y) + jnp.vdot(jnp.tanh(y_h), back.y_h)

    def penalty(given, back):
        value, gradients = jax.value_and_grad(loss)(given, back)
        return value + sum(jnp.sum(g**2) for g in jax.tree.leaves(gradients))

    return jax.jit(jax.grad(penalty, argnums=(0, 1)))


@cache
def _expected_penalty(case, dtype):
    inputs, cotangents = jax.tree.map(_as_float64, make_inputs(case, dtype))
    given, call = _split(inputs)
    with jax.default_device(jax.devices("cpu")[0]):
        return _gradient_of_penalty(call(gru_references.forward, case.settings))(given, cotangents)


@pytest.mark.parametrize("case", thorough_after(1, SETTINGS), ids=str)
def test_gradients_of_a_gradient_penalty(backend, case):
    inputs, cotangents = backend.put(make_inputs(case, backend.widest))
    given, call = _split(inputs)
    found = _gradient_of_penalty(call(backend.gru, case.settings))(given, cotangents)
    expected = _expected_penalty(case, backend.widest)
    _compare(backend, found, expected, 1e-12)
    assert all(np.abs(leaf).max() > 1e-2 for leaf in jax.tree.leaves(expected))


@pytest.mark.parametrize("read", thorough_after(1, ["y", "y_h"]))
def test_a_gradient_penalty_on_one_input_with_one_result_read(backend, read):
    """One gradient and one cotangent only: the others are absent in the second derivative too."""
    case = SETTINGS[0]

    def gradient_of(gru, inputs):
        def penalty(x):
            def loss(x):
                return jnp.sum(gru(*inputs._replace(x=x), **case.settings)[("y", "y_h").index(read)] ** 3)

            return jnp.sum(jax.grad(loss)(x) ** 2)

        return jax.jit(jax.grad(penalty))(inputs.x)

    inputs = make_inputs(case, backend.widest)[0]
    expected = gradient_of(gru_references.forward, jax.tree.map(_as_float64, inputs))
    _compare(backend, gradient_of(backend.gru, backend.put(inputs)), expected, 1e-12)
    assert np.abs(expected).max() > 1e-2


@pytest.mark.parametrize("case", thorough_after(1, SETTINGS[:2]), ids=str)
def test_a_gradient_penalty_does_not_read_the_padding(backend, case):
    inputs, _ = make_inputs(case, backend.widest)

    @jax.jit
    def gradients(inputs):
        given, call = _split(inputs)
        outputs = call(backend.gru, case.settings)

        def penalty(given):
            found = jax.grad(lambda given: sum(jnp.sum(out**2) for out in outputs(given)))(given)
            return sum(jnp.sum(g**2) for g in jax.tree.leaves(found))

        return jax.grad(penalty)(given)

    expected, found = (gradients(backend.put(fill_padding(inputs, value))) for value in (0.0, np.nan))
    for name in NAMES:
        np.testing.assert_allclose(found[name], expected[name], rtol=0, atol=backend.atol(1e-12), err_msg=name)
    np.testing.assert_array_equal(np.asarray(found["x"])[is_padding(inputs)], 0)


def test_third_derivatives(backend):
    case = Case(T=2, B=1, I=1, H=2).bare()
    inputs = make_inputs(case, backend.widest)[0]

    def third(gru, inputs):
        def along(s):
            return jnp.sum(gru(inputs.x * s, inputs.w, inputs.r)[0] ** 2)

        return jax.jit(jax.grad(jax.grad(jax.grad(along))))(1.1)

    expected = third(gru_references.forward, jax.tree.map(_as_float64, inputs))
    np.testing.assert_allclose(third(backend.gru, backend.put(inputs)), expected, rtol=backend.atol(1e-10))


@pytest.mark.parametrize("name", NAMES)
def test_jacobians(backend, name):
    case = Case(T=3, B=2, I=2, H=3, linear_before_reset=True)

    def jacobian(gru, inputs):
        return jax.jit(jax.jacrev(lambda a: gru(*inputs._replace(**{name: a}), **case.settings)))(getattr(inputs, name))

    inputs = make_inputs(case, backend.widest)[0]
    expected = jacobian(gru_references.forward, jax.tree.map(_as_float64, inputs))
    _compare(backend, jacobian(backend.gru, backend.put(inputs)), expected, 1e-13)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_second_derivatives_keep_the_dtype(backend, dtype):
    inputs = backend.put(make_inputs(Case(), dtype)[0])

    def penalty(x):
        gradient = jax.grad(lambda x: jnp.sum(backend.gru(*inputs._replace(x=x))[0] ** 2))(x)
        return jnp.sum(gradient**2)

    found = jax.jit(jax.grad(penalty))(inputs.x)
    assert found.dtype == inputs.x.dtype
    assert np.isfinite(np.asarray(found, np.float32)).all()
    assert np.abs(np.asarray(found, np.float32)).max() > 1e-2


def test_forward_mode_error_names_the_switch(backend):
    inputs = backend.put(make_inputs(Case(), "float32")[0])
    with pytest.raises(TypeError, match=r"custom_vjp[\s\S]*jaxgrad\.forward_mode"):
        jax.jvp(lambda x: backend.gru(*inputs._replace(x=x)), (inputs.x,), (inputs.x,))
