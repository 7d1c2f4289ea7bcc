"""`jaxgrad.nn.nnx.RNN` against `flax.nnx.RNN`: values, gradients, state and steps."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from converted_gru import B, H, I, T, assert_same_bits, assert_trees_close, normal, random_like
from flax import nnx as flax_nnx
from recorded_calls import recorded_calls
from rnn_cases import CALLS, inputs_of, program_of, values_and_gradients

from jaxgrad.nn import nnx

pytestmark = pytest.mark.jax_version

X = jnp.asarray(normal(B, T, I))


def _cell(dtype=None, param_dtype=jnp.float64, **options):
    return flax_nnx.GRUCell(I, H, dtype=dtype, param_dtype=param_dtype, rngs=flax_nnx.Rngs(0), **options)


def _apply(layer, call):
    """`run(params, x)` and random parameters of a layer."""
    graph, params, rest = flax_nnx.split(layer, flax_nnx.Param, ...)

    def run(params, x):
        state = jax.tree.map(lambda a: a, rest)  # variables of this trace, which may draw random keys
        return flax_nnx.merge(graph, params, state)(x, **call)

    return run, random_like(flax_nnx.to_pure_dict(params))


def _compare(theirs, ours, x, call, tolerance=1e-11):
    assert_same_bits(flax_nnx.to_pure_dict(flax_nnx.state(ours)), flax_nnx.to_pure_dict(flax_nnx.state(theirs)))
    (run, params), (reference, _) = _apply(ours, call), _apply(theirs, call)
    found, expected = (values_and_gradients(function, params, x) for function in (run, reference))
    assert_trees_close(found, expected, tolerance)
    assert ["jaxgrad" in program_of(function, params, x) for function in (run, reference)] == [True, False]


@pytest.mark.parametrize("name", ["time major", "reverse, lengths"])
def test_calls(name):
    call = CALLS[name]
    _compare(flax_nnx.RNN(_cell()), nnx.RNN(_cell()), inputs_of(call), call)


def test_attributes_of_the_layer():
    options = {"time_major": True, "return_carry": True, "reverse": True, "keep_order": True}
    _compare(flax_nnx.RNN(_cell(), **options), nnx.RNN(_cell(), **options), inputs_of(options), {})


def test_bidirectional():
    theirs, ours = (flax_nnx.Bidirectional(layer(_cell()), layer(_cell())) for layer in (flax_nnx.RNN, nnx.RNN))
    _compare(theirs, ours, X, {"seq_lengths": CALLS["lengths"]["seq_lengths"], "return_carry": True})


def test_training():
    """nnx's own transformations differentiate and update the layer."""
    found = []
    for layer in (flax_nnx.RNN, nnx.RNN):
        rnn = layer(_cell())

        @flax_nnx.jit
        def step(rnn, x):
            loss, gradients = flax_nnx.value_and_grad(lambda rnn: (rnn(x) ** 2).mean())(rnn)
            params = flax_nnx.state(rnn, flax_nnx.Param)
            flax_nnx.update(rnn, jax.tree.map(lambda p, g: p - g, params, gradients))
            return loss

        found.append([step(rnn, X) for _ in range(3)])
        assert found[-1][2] < found[-1][0]
    assert_trees_close(*found)


def test_vmap():
    """An ensemble of layers, by `nnx.vmap`."""

    @flax_nnx.vmap
    def build(key):
        return nnx.RNN(flax_nnx.GRUCell(I, H, param_dtype=jnp.float64, rngs=flax_nnx.Rngs(key)), rngs=False)

    keys = jax.random.split(jax.random.key(0), 3)
    run = flax_nnx.vmap(lambda rnn, x: rnn(x, initial_carry=jnp.zeros((B, H))), in_axes=(0, None))
    found = run(build(keys), X)
    single = flax_nnx.RNN(flax_nnx.GRUCell(I, H, param_dtype=jnp.float64, rngs=flax_nnx.Rngs(keys[1])))
    assert_trees_close(found[1], single(X))


def test_mixed_precision():
    """Products in bfloat16 of parameters in float32. flax rounds more, to bfloat16 in each step."""
    cells = [_cell(jnp.bfloat16, jnp.float32) for _ in range(2)]
    x = X.astype(jnp.float32)
    _compare(flax_nnx.RNN(cells[0]), nnx.RNN(cells[1]), x, {}, tolerance=4 * 2.0**-7)


def test_promotion_of_the_cell():
    """A `promote_dtype` of the user's."""

    def promote(arrays, dtype=None):
        return tuple(jnp.asarray(a, jnp.float16) for a in arrays)

    run, params = _apply(nnx.RNN(_cell(promote_dtype=promote)), {})
    assert "f16" in program_of(run, params, X)


@pytest.mark.parametrize("carry_init", [None, flax_nnx.initializers.constant(0.3)])
def test_steps_of_a_rollout(carry_init):
    """A rollout calls flax's cell; one call with `reset` computes it again.

    Zeros after a reset are not an array of the op.
    """
    start = 0 if carry_init is None else 0.3
    rnn = nnx.RNN(_cell(carry_init=carry_init))
    flax_nnx.update(rnn, random_like(flax_nnx.to_pure_dict(flax_nnx.state(rnn, flax_nnx.Param))))
    reset = np.random.default_rng(0).random((B, T)) < 0.4
    (text,) = recorded_calls(lambda x: rnn(x, reset=reset, rngs=flax_nnx.Rngs(0)), X)
    assert ("reset_h" in text) == (start != 0)
    carry, outputs = jnp.full((B, H), start, X.dtype), []
    for t in range(T):
        carry, y = rnn.cell(jnp.where(reset[:, t, None], start, carry), X[:, t])
        outputs.append(y)
    assert_trees_close(rnn(X, reset=reset, return_carry=True), (carry, jnp.stack(outputs, 1)))


def test_errors():
    with pytest.raises(TypeError, match=r"jaxgrad.nn.nnx.RNN: cell must be a flax GRUCell, got LSTMCell"):
        nnx.RNN(flax_nnx.LSTMCell(I, H, rngs=flax_nnx.Rngs(0)))(X)
    with pytest.raises(ValueError, match="cell must have gate_fn=sigmoid, got hard_sigmoid"):
        nnx.RNN(_cell(gate_fn=jax.nn.hard_sigmoid))(X)
    cell = _cell()
    cell.dense_h = flax_nnx.LoRALinear(H, 3 * H, lora_rank=2, rngs=flax_nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"cell.dense_h must be a flax.nnx.Linear, got LoRALinear"):
        nnx.RNN(cell)(X)
    with pytest.raises(ValueError, match="state_axes must not split the state over the steps"):
        nnx.RNN(_cell(), state_axes={flax_nnx.Param: 0})(X)
