"""silu and gelu after the convolutions, against `jax.nn` of the plain convolution."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from accelerated import passes as passes_in
from backends import ONEDNN, Backend
from conv_cases import ConvCase, cotangent, make_conv_inputs
from conv_references import in_float64, lax_conv
from conv_running import assert_same, compiled_calls, conv, conv_transpose, run, terms
from conv_transpose_cases import TransposeCase, lax_conv_transpose, make_transpose_inputs

import jaxgrad

BACKENDS = (Backend(None, "cpu"), Backend(None, "gpu"))

LAST = ("NHWC", "HWIO", "NHWC")
CASES = {
    "conv": ConvCase(spatial=(9, 8), features=8, out_features=16, padding=((2, 0), (0, 1)), layout=LAST),
    "depthwise": ConvCase((9, 8), (3, 3), 2, 1, 1, 16, padding=((2, 0), (0, 1)), layout=LAST),
    "no bias": ConvCase(spatial=(6, 7), groups=2, strides=(2, 1), padding="SAME", bias=False),
    "transposed": TransposeCase(spatial=(4, 5), strides=(2, 1)),
}
ACTIVATIONS = {"silu": jax.nn.silu, "gelu": jax.nn.gelu}


def _parts(backend, case, activation, dtype="float32"):
    """The op, `jax.nn` of the plain convolution, and inputs."""
    transposed = isinstance(case, TransposeCase)
    op = (conv_transpose if transposed else conv)(backend, **case.settings, activation=activation)
    plain, make = (lax_conv_transpose, make_transpose_inputs) if transposed else (lax_conv, make_conv_inputs)
    linear = plain(case)
    return op, lambda *inputs: ACTIVATIONS[activation](linear(*inputs)), make(case, dtype)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients(backend, name, activation):
    op, plain, inputs = _parts(backend, CASES[name], activation)
    dy = cotangent(jax.eval_shape(plain, *inputs).shape, "float32")
    found = run(op, backend.put(inputs), backend.put(dy))
    assert_same(found, in_float64(plain, inputs, dy), dtype="float32", terms=terms(inputs, dy), message=name)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64"])
def test_dtypes(backend, dtype, activation):
    """The activation, and its derivative, of the rounded convolution."""
    op, _, inputs = _parts(backend, CASES["conv"], activation, dtype)
    inputs = backend.put(inputs)
    y = conv(backend, **CASES["conv"].settings)(*inputs)
    found, pullback = jax.vjp(lambda bias: op(*inputs[:2], bias), inputs.bias)
    assert (found.dtype, pullback(found)[0].dtype) == (y.dtype, y.dtype)
    wide, slope = jax.vjp(ACTIVATIONS[activation], np.asarray(y, np.float64))
    db = slope(np.asarray(found, np.float64))[0].sum((0, 1, 2))
    eps = float(jnp.finfo(y.dtype).eps)
    np.testing.assert_allclose(np.asarray(found, np.float64), wide, rtol=0, atol=8 * eps * np.abs(wide).max())
    np.testing.assert_allclose(np.asarray(pullback(found)[0]), db, rtol=0, atol=16 * eps * np.abs(db).max())


def test_gelu_is_the_approximation_by_tanh():
    """At 2, the exact gelu differs by 9.8e-5."""
    x, w = np.full((1, 1, 1, 1), 2, np.float32), np.ones((1, 1, 1, 1), np.float32)
    y = float(jaxgrad.conv_general_dilated(x, w, (1, 1), "VALID", activation="gelu")[0, 0, 0, 0])
    assert abs(y - float(jax.nn.gelu(2.0, approximate=True))) < 1e-6
    assert abs(y - float(jax.nn.gelu(2.0, approximate=False))) > 9e-5


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_residuals_are_the_operands_and_the_argument(activation):
    op, _, inputs = _parts(ONEDNN, CASES["conv"], activation)
    y, pullback = jax.vjp(op, *inputs)
    kept = [leaf for leaf in jax.tree.leaves(pullback) if leaf.ndim > 1]
    assert sorted(a.shape for a in kept) == sorted(a.shape for a in (*inputs[:2], y))
    argument = conv(ONEDNN, **CASES["conv"].settings)(*inputs)
    assert any(a.shape == y.shape and np.array_equal(a, argument) for a in kept)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_each_pass_runs_once(activation):
    op, _, inputs = _parts(ONEDNN, CASES["conv"], activation)
    gradient = jax.value_and_grad(lambda *inputs: jnp.sum(jnp.sin(op(*inputs))), (0, 1, 2))
    assert compiled_calls(gradient, *inputs) == (1, 1, 1)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("name", ["conv", "transposed"])
def test_forward_mode_vmap_and_second_derivatives(backend, name, activation):
    op, plain, inputs = _parts(backend, CASES[name], activation)

    def hessian_product(op, inputs, directions):
        slope = jax.grad(lambda inputs: jnp.sum(jnp.sin(op(*inputs))))
        return jax.jvp(slope, (inputs,), (directions,))

    stacked = tuple(np.stack([a, np.roll(a, 1)]) for a in inputs)
    directions = tuple(map(np.cos, stacked))
    with jaxgrad.forward_mode():
        found = jax.jit(jax.vmap(partial(hessian_product, op)))(backend.put(stacked), backend.put(directions))
    expected = jax.jit(jax.vmap(partial(hessian_product, plain)))(stacked, directions)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        tolerance = 2e-5 if backend.platform == "cpu" else 1e-2  # TF32
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * np.abs(b).max())


def test_inside_accelerate_the_op_stays_as_it_is():
    op, _, inputs = _parts(ONEDNN, CASES["conv"], "gelu")
    lowered = jax.jit(jaxgrad.accelerate(op)).lower(*inputs)
    assert passes_in(lowered) == {"forward": 1}


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_integers_raise(activation):
    x, w = np.ones((1, 1, 4), np.int32), np.ones((1, 1, 2), np.int32)
    with pytest.raises(TypeError, match=f"activation='{activation}' needs a floating-point result, got int32"):
        jaxgrad.conv_general_dilated(x, w, (1,), "VALID", activation=activation)
