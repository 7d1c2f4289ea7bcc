"""`jaxgrad.nn.linen.RNN` against `flax.linen.RNN`: values, gradients, parameters and steps."""

from __future__ import annotations

from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from converted_gru import B, H, I, T, assert_same_bits, assert_trees_close, normal, random_like
from recorded_calls import recorded_calls
from rnn_cases import CALLS, inputs_of, program_of, values_and_gradients
from thorough import oldest_one_in

from jaxgrad.nn import linen

pytestmark = pytest.mark.jax_version

CELL = {"features": H, "param_dtype": jnp.float64}
X = jnp.asarray(normal(B, T, I))


def _layers(cell=CELL, **options):
    return nn.RNN(nn.GRUCell(**cell), **options), linen.RNN(nn.GRUCell(**cell), **options)


def _compare(theirs, ours, x, call, tolerance=1e-11):
    variables = theirs.init(jax.random.key(0), x)
    assert_same_bits(ours.init(jax.random.key(0), x), variables)
    variables = random_like(variables)
    found, expected = (
        values_and_gradients(lambda v, x, layer=layer: layer.apply(v, x, **call), variables, x)
        for layer in (ours, theirs)
    )
    assert_trees_close(found, expected, tolerance)
    programs = [
        program_of(lambda v, x, layer=layer: layer.apply(v, x, **call), variables, x) for layer in (ours, theirs)
    ]
    assert ["jaxgrad" in program for program in programs] == [True, False]


@pytest.mark.parametrize("name", oldest_one_in(2, CALLS))
def test_calls(name):
    call = CALLS[name]
    _compare(*_layers(), inputs_of(call), call)


def test_attributes_of_the_layer():
    options = {"time_major": True, "return_carry": True, "reverse": True, "keep_order": True}
    _compare(*_layers(**options), inputs_of(options), {})


def test_other_batches():
    """None, and two dimensions."""
    theirs, ours = _layers()
    variables = random_like(ours.init(jax.random.key(0), X))
    two = jnp.asarray(normal(2, B, T, I))
    for x, options in (
        (X[0], {"reverse": True}),
        (two, {"reverse": True}),
        (jnp.moveaxis(two, 2, 0), {"time_major": True}),
        (jnp.moveaxis(two, 2, 0), {"reverse": True, "keep_order": True, "time_major": True}),
    ):
        found, expected = (layer.apply(variables, x, return_carry=True, **options) for layer in (ours, theirs))
        assert_trees_close(found, expected)


def test_bidirectional():
    layers = []
    for layer in (nn.RNN, linen.RNN):
        layers.append(nn.Bidirectional(layer(nn.GRUCell(**CELL)), layer(nn.GRUCell(**CELL)), return_carry=True))
    _compare(*layers, X, {"seq_lengths": CALLS["lengths"]["seq_lengths"]})


class _Model(nn.Module):
    rnn: type

    @nn.compact
    def __call__(self, x):
        x = self.rnn(nn.GRUCell(**CELL))(x)
        return nn.Dense(2, param_dtype=jnp.float64)(self.rnn(nn.GRUCell(**CELL), name="second")(x))


def test_inside_a_model():
    """The paths of the parameters are those of flax, with and without names."""
    _compare(_Model(nn.RNN), _Model(linen.RNN), X, {})


def test_vmap():
    """An ensemble: parameters and inputs are mapped."""
    theirs, ours = _layers()
    keys = jax.random.split(jax.random.key(0), 3)
    variables = jax.vmap(theirs.init, (0, None))(keys, X)
    x = jnp.stack([X, 2 * X, -X])
    assert_trees_close(jax.jit(jax.vmap(ours.apply))(variables, x), jax.vmap(theirs.apply)(variables, x))


@pytest.mark.parametrize("call", [{}, {"return_carry": True, "initial_carry": jnp.zeros((B, H), jnp.bfloat16)}])
def test_mixed_precision(call):
    """Products in bfloat16 of parameters in float32. flax rounds more, to bfloat16 in each step."""
    cell = {"features": H, "dtype": jnp.bfloat16}
    _compare(*_layers(cell), X.astype(jnp.float32), call, tolerance=4 * 2.0**-7)


class _CellWithItsOwnCarry(nn.GRUCell):
    def initialize_carry(self, rng, input_shape):
        return jnp.full((*input_shape[:-1], self.features), 0.3, self.param_dtype)


@pytest.mark.parametrize(
    ("cell", "start"),
    [
        (nn.GRUCell(**CELL), 0),
        (nn.GRUCell(**CELL, carry_init=nn.initializers.constant(0.3)), 0.3),
        (_CellWithItsOwnCarry(**CELL), 0.3),
    ],
    ids=["default", "carry_init", "initialize_carry"],
)
@pytest.mark.parametrize("time_major", [False, True])
def test_steps_of_a_rollout(time_major, cell, start):
    """A rollout calls flax's cell with the same parameters; one call with `reset` computes it again.

    Zeros after a reset are not an array of the op.
    """
    ours = linen.RNN(cell)
    variables = random_like(ours.init(jax.random.key(0), X))
    params = {"params": variables["params"]["cell"]}
    reset = np.random.default_rng(0).random((B, T)) < 0.4
    (text,) = recorded_calls(partial(ours.apply, variables, reset=reset), X)
    assert ("reset_h" in text) == (start != 0)
    carry, outputs = jnp.full((B, H), start, X.dtype), []
    for t in range(T):
        carry = jnp.where(reset[:, t, None], start, carry)
        carry, y = cell.apply(params, carry, X[:, t])
        outputs.append(y)
    if time_major:
        found = ours.apply(variables, X.swapaxes(0, 1), reset=reset.T, return_carry=True, time_major=True)
    else:
        found = ours.apply(variables, X, reset=reset, return_carry=True)
    assert_trees_close(found, (carry, jnp.stack(outputs, 0 if time_major else 1)))


def test_reset_in_reverse():
    """With lengths, the resets are reversed with the steps."""
    _, ours = _layers()
    variables = random_like(ours.init(jax.random.key(0), X))
    reset = np.zeros((B, T), bool)
    reset[:, 2] = True
    lengths = np.full(B, T)
    for call in ({}, {"seq_lengths": lengths}):
        found = ours.apply(variables, X, reset=reset, reverse=True, keep_order=True, **call)
        expected = ours.apply(variables, X[:, :3], reverse=True, keep_order=True)
        assert_trees_close(found[:, :3], expected)


def test_partitioned_parameters():
    cell = {**CELL, "kernel_init": nn.with_partitioning(nn.initializers.lecun_normal(), (None, "model"))}
    _compare(*_layers(cell), X, {})


def test_errors():
    with pytest.raises(TypeError, match=r"jaxgrad.nn.linen.RNN: cell must be a flax GRUCell, got LSTMCell; use flax's"):
        linen.RNN(nn.LSTMCell(H)).init(jax.random.key(0), X)
    with pytest.raises(TypeError, match="cell must be a flax GRUCell, got Checkpoint"):
        linen.RNN(nn.remat(nn.GRUCell)(H)).init(jax.random.key(0), X)
    with pytest.raises(ValueError, match="cell must have activation_fn=tanh, got relu"):
        linen.RNN(nn.GRUCell(H, activation_fn=nn.relu)).init(jax.random.key(0), X)
    with pytest.raises(ValueError, match="variable_broadcast must contain 'params' and variable_axes must not"):
        linen.RNN(nn.GRUCell(H), variable_axes={"params": 0}, variable_broadcast=False).init(jax.random.key(0), X)
    with pytest.raises(ValueError, match=r"reset must have the shape \[\*batch, time\] = \(3, 6\), got \(6, 3\)"):
        linen.RNN(nn.GRUCell(H)).init(jax.random.key(0), X, reset=jnp.zeros((T, B), bool))
