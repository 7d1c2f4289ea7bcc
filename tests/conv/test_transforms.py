"""The convolutions inside control flow and transformations of JAX, against plain calls or `jax.lax`."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from backends import CONVOLUTION, ONEDNN
from conv_cases import ConvCase, make_conv_inputs
from conv_running import compiled_calls, conv, conv_transpose
from conv_transpose_cases import TransposeCase, make_transpose_inputs
from jax import lax

import jaxgrad

pytestmark = pytest.mark.jax_version

BACKENDS = CONVOLUTION

# The result has the shape of lhs, so that layers can be stacked.
CASE = ConvCase(spatial=(6, 5), window=(3, 2), features=4, out_features=4, padding="SAME")
TRANSPOSED = TransposeCase(strides=(2, 3))
POLICIES = {
    "none": None,
    "everything": jax.checkpoint_policies.everything_saveable,
    "nothing": jax.checkpoint_policies.nothing_saveable,
    "dots": jax.checkpoint_policies.dots_saveable,
}


def _compare(found, expected, atol=2e-5):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=atol), found, expected)


def _inputs(backend):
    return backend.put(tuple(make_conv_inputs(CASE)))


def _lax(lhs, rhs, bias):
    return lax.conv_general_dilated(lhs, rhs, **CASE.settings) + bias[:, None, None]


def _gradient(op):
    return jax.grad(lambda inputs: jnp.sum(jnp.sin(op(*inputs))))


@pytest.mark.parametrize("transposed", [False, True])
def test_results_match_with_and_without_jit(backend, transposed):
    if transposed:
        op, inputs = conv_transpose(backend, **TRANSPOSED.settings), tuple(make_transpose_inputs(TRANSPOSED))
    else:
        op, inputs = conv(backend, **CASE.settings), tuple(make_conv_inputs(CASE))
    inputs = backend.put(inputs)
    _compare(op(*inputs), jax.jit(op)(*inputs))
    _compare(_gradient(op)(inputs), jax.jit(_gradient(op))(inputs))
    _compare(_gradient(jax.jit(op))(inputs), jax.jit(_gradient(op))(inputs))


@pytest.mark.parametrize("policy", POLICIES)
def test_checkpoint(backend, policy):
    op, inputs = conv(backend, **CASE.settings), _inputs(backend)

    def two(lhs, rhs, bias):
        return op(jnp.tanh(op(lhs, rhs, bias)), rhs, bias)

    rematerialized = _gradient(jax.checkpoint(two, policy=POLICIES[policy]))
    _compare(jax.jit(rematerialized)(inputs), jax.jit(_gradient(two))(inputs))


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_checkpoint_recomputes_only_the_first_layer(policy):
    op, inputs = conv(ONEDNN, **CASE.settings), _inputs(ONEDNN)

    def two(lhs, rhs, bias):
        return op(jnp.tanh(op(lhs, rhs, bias)), rhs, bias)

    forward, input_gradient, weight_gradient = compiled_calls(_gradient(jax.checkpoint(two, policy=policy)), inputs)
    assert (input_gradient, weight_gradient) == (2, 2)
    assert forward in (2, 3)  # XLA may merge the recomputed first layer with the original


def test_scan_over_layers(backend):
    op, (lhs, rhs, bias) = conv(backend, **CASE.settings), _inputs(backend)
    stacked = jnp.stack([rhs, -rhs, rhs / 2])

    def network(op):
        def layer(lhs, rhs):
            y = jnp.tanh(op(lhs, rhs, bias))
            return y, jnp.sum(y)

        return jax.jit(jax.grad(lambda rhs: sum(map(jnp.sum, lax.scan(layer, lhs, rhs)))))

    _compare(network(op)(stacked), network(_lax)(stacked), atol=2e-4)


def test_loops_and_branches(backend):
    op, (lhs, rhs, bias) = conv(backend, **CASE.settings), _inputs(backend)

    def program(op):
        def body(carry):
            count, x = carry
            return count + 1, jnp.tanh(op(x, rhs, bias))

        looped = lax.while_loop(lambda carry: carry[0] < 3, body, (0, lhs))[1]
        return [lax.cond(sign * jnp.sum(lhs) > 0, lambda x: op(x, rhs, bias), jnp.tanh, looped) for sign in (1, -1)]

    _compare(jax.jit(lambda: program(op))(), jax.jit(lambda: program(_lax))())


def test_donated_buffers(backend):
    op, inputs = conv(backend, **CASE.settings), _inputs(backend)
    expected = op(*inputs)
    copies = backend.put(tuple(make_conv_inputs(CASE)))
    # The result has the shape of lhs: XLA may write it over lhs.
    found = jax.jit(op, donate_argnums=0)(*copies)
    assert copies[0].is_deleted()
    _compare(found, expected)


def test_training_steps_with_donated_weights(backend):
    op, inputs = conv(backend, **CASE.settings), _inputs(backend)

    def step(rhs, bias, lhs):
        gradients = jax.grad(lambda rhs, bias: jnp.mean(op(lhs, rhs, bias) ** 2), argnums=(0, 1))(rhs, bias)
        return rhs - gradients[0], bias - gradients[1]

    expected = inputs[1:]
    donated = backend.put(tuple(map(np.array, expected)))
    plain, donating = jax.jit(step), jax.jit(step, donate_argnums=(0, 1))
    for _ in range(3):
        expected, donated = plain(*expected, inputs[0]), donating(*donated, inputs[0])
    _compare(donated, expected)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64", "int8"])
def test_eval_shape(dtype):
    lhs, rhs = jax.ShapeDtypeStruct((2, 5, 7, 4), dtype), jax.ShapeDtypeStruct((3, 2, 2, 6), dtype)
    settings = {"dimension_numbers": ("NHWC", "HWIO", "NHWC"), "feature_group_count": 2}
    y, expected = (
        jax.eval_shape(lambda a, b, op=op: op(a, b, (2, 1), "SAME", **settings), lhs, rhs)
        for op in (jaxgrad.conv_general_dilated, lax.conv_general_dilated)
    )
    assert (y.shape, y.dtype, y.weak_type) == (expected.shape, expected.dtype, expected.weak_type)


def test_a_pullback_may_be_called_again(backend):
    op, inputs = conv(backend, **CASE.settings), _inputs(backend)
    y, pullback = jax.vjp(op, *inputs)
    _compare(pullback(2 * y), jax.tree.map(lambda g: 2 * g, pullback(y)), atol=1e-3)


def test_settings_given_as_arrays_and_lists():
    """`jax.lax` accepts any sequence of integers."""
    inputs = make_conv_inputs(CASE)
    settings = {"window_strides": np.array([2, 1]), "padding": np.array([[1, 0], [0, 2]]), "rhs_dilation": [1, 2]}
    expected = lax.conv_general_dilated(*inputs[:2], **settings)
    for implementation in ("onednn", "xla", None):
        y = jaxgrad.conv_general_dilated(*inputs[:2], **settings, implementation=implementation)
        _compare(y, expected)


@pytest.mark.parametrize("name", ["lhs_dilation", "rhs_dilation"])
def test_dilation_given_as_an_array(name):
    inputs = make_conv_inputs(CASE)
    settings = {"window_strides": (1, 1), "padding": ((1, 0), (0, 2)), name: np.array([2, 1])}
    expected = lax.conv_general_dilated(*inputs[:2], **settings)
    _compare(jaxgrad.conv_general_dilated(*inputs[:2], **settings), expected)
