"""Gradients that are not requested are not computed, and the others do not change."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from backends import CONVOLUTION, ONEDNN
from conv_cases import FIELDS, ConvCase, cotangent, make_conv_inputs
from conv_running import assert_same, compiled_calls, conv, conv_transpose, run, terms
from conv_transpose_cases import TransposeCase, make_transpose_inputs

BACKENDS = CONVOLUTION

SUBSETS = [names for n in range(1, 4) for names in itertools.combinations(FIELDS, n)]
CASE = ConvCase(strides=(2, 1), padding=((1, 0), (0, 2)))
TRANSPOSED = TransposeCase(strides=(2, 1))


def _op_and_inputs(backend, case):
    if isinstance(case, TransposeCase):
        return conv_transpose(backend, **case.settings), make_transpose_inputs(case)
    return conv(backend, **case.settings), make_conv_inputs(case)


def _gradient(op, inputs, requested):
    """Gradient function for the requested operands, of a loss with a constant dy, and its argument."""
    y = jax.eval_shape(op, *inputs)
    dy = cotangent(y.shape, "float32")

    def loss(differentiated):
        return jnp.vdot(op(*inputs._replace(**differentiated)), dy)

    return jax.grad(loss), {name: getattr(inputs, name) for name in requested}


@pytest.mark.parametrize("requested", SUBSETS, ids="-".join)
@pytest.mark.parametrize("case", [CASE, CASE.replace(groups=3), TRANSPOSED], ids=["plain", "groups", "transposed"])
def test_every_gradient_subset_matches_all_gradients(backend, requested, case):
    op, inputs = _op_and_inputs(backend, case)
    dy = cotangent(jax.eval_shape(op, *inputs).shape, "float32")
    full, some = run(op, inputs, dy), run(op, inputs, dy, requested)
    assert [name for name in FIELDS if getattr(some, name) is not None] == list(requested)
    assert_same(some, full, dtype="float32", terms=terms(inputs, dy))


@pytest.mark.parametrize("requested", SUBSETS, ids="-".join)
def test_program_holds_only_the_requested_gradients(requested):
    op, inputs = _op_and_inputs(ONEDNN, CASE)
    gradient, differentiated = _gradient(op, inputs, requested)
    expected = (0, int("lhs" in requested), int("rhs" in requested))  # no gradient reads y
    assert compiled_calls(gradient, differentiated) == expected


@pytest.mark.parametrize("requested", SUBSETS, ids="-".join)
def test_program_of_conv_transpose_holds_only_the_requested_gradients(requested):
    """A transposed convolution is the input gradient of a convolution, and its input gradient is that convolution."""
    op, inputs = _op_and_inputs(ONEDNN, TRANSPOSED)
    gradient, differentiated = _gradient(op, inputs, requested)
    assert compiled_calls(gradient, differentiated) == (int("lhs" in requested), 0, int("rhs" in requested))


@pytest.mark.parametrize("requested", SUBSETS, ids="-".join)
def test_value_and_gradients_are_one_call_each(requested):
    """Through a jitted function and with the default implementation; nothing is computed twice."""
    inner = jax.jit(conv(type(ONEDNN)(None, "cpu"), **CASE.settings))
    inputs = make_conv_inputs(CASE)

    def loss(differentiated):
        return jnp.sum(jnp.sin(inner(*inputs._replace(**differentiated))))

    differentiated = {name: getattr(inputs, name) for name in requested}
    with jax.default_device(jax.devices("cpu")[0]):
        found = compiled_calls(jax.value_and_grad(loss), differentiated)
    assert found == (1, int("lhs" in requested), int("rhs" in requested))


def _shapes(hlo, kind):
    """The result shapes of the only call of a kernel."""
    (line,) = [line for line in hlo.splitlines() if f'custom_call_target="jaxgrad_onednn_conv_{kind}"' in line]
    return line.split(" = ", 1)[1].split(" custom-call(")[0]


@pytest.mark.parametrize("with_bias", [False, True])
def test_bias_gradient_comes_from_the_weight_gradient_kernel(with_bias):
    """In one pass with dw if both are requested; empty if only dw is."""
    op, inputs = _op_and_inputs(ONEDNN, CASE)
    gradient, differentiated = _gradient(op, inputs, ("rhs", "bias") if with_bias else ("rhs",))
    shapes = _shapes(jax.jit(gradient).lower(differentiated).compile().as_text(), "weight_gradient")
    assert ("f32[5]" in shapes, "f32[0]" in shapes) == (with_bias, not with_bias)


def test_the_bias_gradient_sums_dy(backend):
    """Alone, together with dw, and in a channels-last layout."""
    for case in (CASE, CASE.replace(layout=("NHWC", "HWIO", "NHWC")), TRANSPOSED):
        op, inputs = _op_and_inputs(backend, case)
        dy = cotangent(jax.eval_shape(op, *inputs).shape, "float32")
        axes = tuple(axis for axis in range(4) if axis != case.numbers.out_spec[1])
        for requested in (("bias",), ("rhs", "bias")):
            db = run(op, inputs, dy, requested).bias
            np.testing.assert_allclose(db, dy.astype(np.float64).sum(axes), rtol=0, atol=1e-4)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("transposed", [False, True])
def test_the_bias_gradient_of_a_long_sum(backend, dtype, transposed):
    """6272 terms per element, too many for a sum in the narrow dtype."""
    case = TRANSPOSED if transposed else ConvCase()
    case = case.replace(spatial=(28, 28), batch=8, window=(1, 1), strides=(1, 1) if not transposed else (2, 1))
    case = case.replace(features=2, out_features=4, padding="VALID")
    op = (conv_transpose if transposed else conv)(backend, **case.settings)
    inputs = make_transpose_inputs(case, dtype) if transposed else make_conv_inputs(case, dtype)
    shape = jax.eval_shape(op, *inputs).shape
    dy = cotangent(shape, dtype) + np.asarray(0.1, dtype)
    db = run(op, inputs, dy, ("bias",)).bias
    axes = tuple(axis for axis in range(4) if axis != case.numbers.out_spec[1])
    expected = dy.astype(np.float64).sum(axes)
    np.testing.assert_allclose(db.astype(np.float64), expected, rtol=1.5 * float(jnp.finfo(dtype).eps))
