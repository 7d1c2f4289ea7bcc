"""`eqx.nn.GRUCell`, against the cell in a `lax.scan`."""

from __future__ import annotations

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from converted_gru import H, I, T, assert_same_bits, normal

from jaxgrad.convert import equinox as convert

pytestmark = pytest.mark.jax_version

X = normal(T, I)


def _scan(cell, reverse=False):
    def step(h, x):
        h = cell(x, h)
        return h, h

    return jax.lax.scan(step, jnp.zeros(H), X, reverse=reverse)[1]


@pytest.mark.parametrize("use_bias", [True, False])
def test_read_and_write(use_bias):
    cells = [eqx.nn.GRUCell(I, H, use_bias, jnp.float64, key=jax.random.key(seed)) for seed in range(3)]
    single, both = convert.read_gru(cells[0], (cells[1], cells[2]))
    np.testing.assert_allclose(single(X[:, None])[0][:, 0, 0], _scan(cells[0]), rtol=0, atol=1e-12)
    y = both(X[:, None])[0][:, :, 0]
    np.testing.assert_allclose(y[:, 0], _scan(cells[1]), rtol=0, atol=1e-12)
    np.testing.assert_allclose(y[:, 1], _scan(cells[2], reverse=True), rtol=0, atol=1e-12)
    assert_same_bits(convert.write_gru((single, both)), (cells[0], (cells[1], cells[2])))


def test_errors():
    with pytest.raises(TypeError, match=r"must be an equinox.nn.GRUCell or a pair of them, got LSTMCell"):
        convert.read_gru(eqx.nn.LSTMCell(I, H, key=jax.random.key(0)))
