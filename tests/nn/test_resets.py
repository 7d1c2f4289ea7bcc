"""Resets of the layers of all frameworks: bools or numbers, and the gradient of numbers."""

from __future__ import annotations

import equinox as eqx
import flax.linen
import flax.nnx
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxgrad import nn
from jaxgrad.nn import equinox, haiku, linen, nnx

pytestmark = pytest.mark.jax_version

T, B, I, H = 6, 3, 2, 4  # noqa: E741
KEY = jax.random.key(0)
X = jax.random.normal(KEY, (T, B, I), jnp.float32)
RESET = np.random.default_rng(0).random((T, B)) < 0.4


def _linen():
    rnn = linen.RNN(flax.linen.GRUCell(H), time_major=True)
    variables = rnn.init(KEY, X)
    return lambda reset: rnn.apply(variables, X, reset=reset)


def _nnx():
    rnn = nnx.RNN(flax.nnx.GRUCell(I, H, rngs=flax.nnx.Rngs(0)), time_major=True, rngs=False)
    return lambda reset: rnn(X, initial_carry=jnp.zeros((B, H), jnp.float32), reset=reset)


def _equinox():
    cell = eqx.nn.GRUCell(I, H, key=KEY)
    run = jax.vmap(lambda x, reset: equinox.scan_gru(cell, jnp.zeros(H, jnp.float32), x, reset=reset)[1], 1, 1)
    return lambda reset: run(X, reset)


def _haiku():
    def run(reset):
        core = hk.ResetCore(hk.GRU(H))
        return haiku.dynamic_unroll(core, (X, reset), core.initial_state(B))[0]

    module = hk.without_apply_rng(hk.transform(run))
    params = module.init(KEY, RESET)
    return lambda reset: module.apply(params, reset)


def _own(batch_first):
    gru = nn.GRU(I, H, 2, batch_first=batch_first, key=KEY)
    return lambda reset: gru(X.swapaxes(0, 1), reset=reset.T)[0] if batch_first else gru(X, reset=reset)[0]


LAYERS = {
    "linen": _linen,
    "nnx": _nnx,
    "equinox": _equinox,
    "haiku": _haiku,
    "nn.GRU": lambda: _own(False),
    "nn.GRU, batch first": lambda: _own(True),
}


@pytest.mark.parametrize("name", LAYERS)
def test_numbers(name):
    run = LAYERS[name]()
    expected = run(RESET)
    assert not np.array_equal(expected, run(np.zeros_like(RESET)))
    for numbers in (RESET.astype(np.float32), 2 * RESET.astype(np.int32), jnp.where(RESET, jnp.nan, 0)):
        np.testing.assert_array_equal(run(numbers), expected)
    gradient = jax.grad(lambda reset: (run(reset) ** 2).sum())(RESET.astype(np.float32))
    np.testing.assert_array_equal(gradient, np.zeros(RESET.shape))
