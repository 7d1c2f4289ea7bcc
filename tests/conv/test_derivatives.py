"""Higher derivatives of the convolutions, whose differentiation rules call one another."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from backends import CONVOLUTION, ONEDNN
from conv_cases import ConvCase, make_conv_inputs
from conv_references import lax_conv
from conv_running import compiled_calls, conv, conv_transpose
from conv_transpose_cases import TransposeCase, lax_conv_transpose, make_transpose_inputs
from jax.test_util import check_grads
from thorough import one_in

BACKENDS = CONVOLUTION

SMALL = {"spatial": (4, 5), "window": (2, 3), "features": 2, "out_features": 3}
CASES = [
    ConvCase(**SMALL, strides=(2, 1), padding=((1, 0), (0, 2)), rhs_dilation=(1, 2)),
    ConvCase(**SMALL, groups=2, padding="SAME", strides=(1, 2), layout=("NHWC", "HWIO", "NHWC")),
    ConvCase(**SMALL, groups=2, lhs_dilation=(2, 1), padding=((1, 2), (-1, 3))),
    TransposeCase(**SMALL, strides=(2, 1)),
    TransposeCase(
        **SMALL, strides=(1, 2), groups=2, padding=((1, 0), (0, 1)), output_padding=(0, 1), transpose_kernel=True
    ),
]


def _op(backend, case):
    if isinstance(case, TransposeCase):
        return conv_transpose(backend, **case.settings), make_transpose_inputs(case, "float64")
    return conv(backend, **case.settings), make_conv_inputs(case, "float64")


def _reference(case):
    return lax_conv_transpose(case) if isinstance(case, TransposeCase) else lax_conv(case)


@pytest.mark.parametrize("case", one_in(2, CASES), ids=str)
def test_numerical_derivatives_in_float64(case):
    op, inputs = _op(type(ONEDNN)(None, "cpu"), case)
    check_grads(op, tuple(map(jnp.asarray, inputs)), order=2, modes=["rev"], atol=1e-6, rtol=1e-6)


def _penalty(op, inputs):
    """A gradient penalty: the sum of the squared gradients of all operands."""

    def loss(inputs):
        return jnp.sum(jnp.sin(op(*inputs)))

    return sum(jnp.vdot(g, g) for g in jax.grad(loss)(inputs))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradients_of_a_gradient_penalty(backend, case):
    op, inputs = _op(backend, case)
    expected = jax.jit(jax.grad(partial(_penalty, _reference(case))))(tuple(inputs))
    narrow = backend.put(tuple(np.asarray(a, np.float32) for a in inputs))
    actual = jax.jit(jax.grad(partial(_penalty, op)))(narrow)
    for found, desired in zip(actual, expected, strict=True):
        assert found.dtype == jnp.float32
        np.testing.assert_allclose(found, desired, rtol=0, atol=3e-6 * np.abs(desired).max())


def test_third_derivatives(backend):
    """The gradient of a sum over the gradient of a gradient penalty."""
    op, inputs = _op(backend, CASES[0])
    narrow = backend.put(tuple(np.asarray(a, np.float32) for a in inputs))

    def third(op, inputs):
        inner = jax.grad(partial(_penalty, op))
        return jax.grad(lambda inputs: sum(jnp.sum(jnp.cos(g)) for g in inner(inputs)))(inputs)

    expected = jax.jit(partial(third, _reference(CASES[0])))(tuple(inputs))
    actual = jax.jit(partial(third, op))(narrow)
    for found, desired in zip(actual, expected, strict=True):
        np.testing.assert_allclose(found, desired, rtol=0, atol=2e-4 * np.abs(desired).max())


def test_second_derivatives_run_on_the_kernels():
    """The gradient of the squared input gradient depends on x through dy."""
    case = ConvCase(**SMALL, bias=False)
    op, inputs = _op(ONEDNN, case)
    lhs, rhs = (np.asarray(a, np.float32) for a in inputs[:2])

    def penalty(lhs):
        gradient = jax.grad(lambda lhs: jnp.sum(op(lhs, rhs) ** 3))(lhs)
        return jnp.vdot(gradient, gradient)

    forward, input_gradient, weight_gradient = compiled_calls(jax.grad(penalty), lhs)
    assert (forward, input_gradient, weight_gradient) == (2, 2, 0)


def test_gradient_of_the_weight_gradient_alone(backend):
    """The gradient with respect to x of a function of dw, without a bias gradient."""
    op, inputs = _op(backend, CASES[1])

    def loss(op, lhs, others):
        return jnp.sum(jax.grad(lambda rhs: jnp.sum(jnp.sin(op(lhs, rhs, others[1]))))(others[0]) ** 2)

    wide = tuple(map(jnp.asarray, inputs))
    expected = jax.grad(partial(loss, _reference(CASES[1])))(wide[0], wide[1:])
    narrow = backend.put(tuple(np.asarray(a, np.float32) for a in inputs))
    found = jax.grad(partial(loss, op))(narrow[0], narrow[1:])
    np.testing.assert_allclose(found, expected, rtol=0, atol=3e-6 * np.abs(expected).max())


@pytest.mark.parametrize("read", [0, 1], ids=["dw", "db"])
def test_gradient_of_either_the_weight_or_the_bias_gradient(read):
    """Both gradients are requested and one is read: the cotangent of the other is a symbolic zero."""
    op, inputs = _op(ONEDNN, CASES[1])

    def loss(op, lhs, others):
        return jnp.sum(jax.grad(lambda others: jnp.sum(jnp.sin(op(lhs, *others))))(others)[read] ** 2)

    wide = tuple(map(jnp.asarray, inputs))
    expected = jax.grad(partial(loss, _reference(CASES[1])))(wide[0], wide[1:])
    narrow = tuple(np.asarray(a, np.float32) for a in inputs)
    found = jax.grad(partial(loss, op))(narrow[0], narrow[1:])
    np.testing.assert_allclose(found, expected, rtol=0, atol=3e-6 * np.abs(expected).max())
