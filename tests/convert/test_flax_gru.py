"""Parameters of flax's `GRUCell`, against `RNN` and `Bidirectional` of linen and nnx."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from converted_gru import B, H, I, T, assert_same_bits, normal, random_like
from flax import nnx

from jaxgrad.convert import flax as convert

pytestmark = pytest.mark.jax_version

X = normal(B, T, I)


def _joined(y):
    return y.reshape(*y.shape[:2], -1)


def test_linen():
    rnn = nn.RNN(nn.GRUCell(H, param_dtype=jnp.float64))
    variables = random_like(rnn.init(jax.random.key(0), X))
    (layer,) = convert.read_gru(variables["params"])
    np.testing.assert_allclose(_joined(layer(X, time_major=False)[0]), rnn.apply(variables, X), rtol=0, atol=1e-12)
    (cell,) = convert.write_gru(layer)
    assert_same_bits(cell, variables["params"]["cell"])


def test_linen_bidirectional():
    forward, backward = (nn.RNN(nn.GRUCell(H, param_dtype=jnp.float64)) for _ in range(2))
    rnn = nn.Bidirectional(forward, backward)
    variables = random_like(rnn.init(jax.random.key(0), X))
    layers = convert.read_gru(variables)
    np.testing.assert_allclose(_joined(layers[0](X, time_major=False)[0]), rnn.apply(variables, X), rtol=0, atol=1e-12)
    ((first, second),) = convert.write_gru(layers)
    params = variables["params"]
    assert_same_bits((first, second), (params["forward_rnn"]["cell"], params["backward_rnn"]["cell"]))


@pytest.mark.parametrize("as_state", [True, False])
def test_nnx(as_state):
    cells = [nnx.GRUCell(I, H, param_dtype=jnp.float64, rngs=nnx.Rngs(seed)) for seed in range(2)]
    rnn = nnx.Bidirectional(nnx.RNN(cells[0]), nnx.RNN(cells[1]))
    nnx.update(rnn, random_like(nnx.state(rnn, nnx.Param)))
    layers = convert.read_gru(nnx.state(rnn, nnx.Param) if as_state else rnn)
    np.testing.assert_allclose(_joined(layers[0](X, time_major=False)[0]), rnn(X), rtol=0, atol=1e-12)
    (written,) = convert.write_gru(layers, api="nnx")
    assert_same_bits(written, tuple(nnx.to_pure_dict(nnx.state(cell, nnx.Param)) for cell in cells))
    # A trained record is loaded by the cell, because it has the biases of the cell only.
    trained = jax.tree.map(lambda a: 2 * a, convert.read_gru(cells[0]))
    nnx.update(cells[0], convert.write_gru(trained, api="nnx")[0])
    np.testing.assert_array_equal(cells[0].dense_i.bias[...], 2 * written[0]["dense_i"]["bias"])


def test_errors():
    linen = nn.GRUCell(H).init(jax.random.key(0), jnp.zeros((B, H)), jnp.zeros((B, I)))
    layers = convert.read_gru(jax.tree.map(jnp.ones_like, linen))
    with pytest.raises(ValueError, match=r"zeros as the recurrent bias of the gate n, .* got values up to 1.0"):
        convert.write_gru(layers, api="nnx")
    lstm = nn.SimpleCell(H).init(jax.random.key(0), jnp.zeros((B, H)), jnp.zeros((B, I)))
    with pytest.raises(ValueError, match=r"the parameters of linen.GRUCell .*, got \['i', 'h'\]"):
        convert.read_gru(lstm)
    mgu = nn.MGUCell(H).init(jax.random.key(0), jnp.zeros((B, H)), jnp.zeros((B, I)))
    with pytest.raises(ValueError, match=r"a layer must have the parameters of linen.GRUCell"):
        convert.read_gru(mgu)
    with pytest.raises(ValueError, match="cell must have activation_fn=tanh, got relu"):
        convert.read_gru(nnx.GRUCell(I, H, activation_fn=jax.nn.relu, rngs=nnx.Rngs(0)))
    cell = nnx.GRUCell(I, H, rngs=nnx.Rngs(0))
    cell.dense_h = nnx.LoRALinear(H, 3 * H, lora_rank=1, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"cell\.dense_h must be a flax\.nnx\.Linear, got LoRALinear"):
        convert.read_gru(cell)


def test_nnx_reverse():
    rnn = nnx.RNN(nnx.GRUCell(I, H, param_dtype=jnp.float64, rngs=nnx.Rngs(0)), reverse=True, keep_order=True)
    (layer,) = convert.read_gru(rnn)
    np.testing.assert_allclose(_joined(layer(X, time_major=False)[0]), rnn(X), rtol=0, atol=1e-12)
    with pytest.raises(ValueError, match="the forward direction of a layer must not run in reverse"):
        convert.read_gru(nnx.Bidirectional(rnn, rnn))


def test_pairs():
    cells = [nnx.GRUCell(I, size, rngs=nnx.Rngs(0)) for size in (H, H + 1)]
    with pytest.raises(ValueError, match="the two directions of a layer must have the same sizes"):
        convert.read_gru(cells)
    with pytest.raises(ValueError, match="a pair of the forward and the backward cell, got 3"):
        convert.read_gru([cells[0]] * 3)
