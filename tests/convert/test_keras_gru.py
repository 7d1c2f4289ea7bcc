"""GRU layers of Keras 3, against their own forward pass."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from converted_gru import B, H, I, T, assert_same_bits, normal

from jaxgrad.convert import keras as convert

keras = pytest.importorskip("keras")

X = normal(B, T, I)


def _build(layer):
    """Gives the layer random weights. Keras initializes biases with zeros."""
    layer.build(X.shape)
    layer.set_weights([normal(*a.shape, seed=number) for number, a in enumerate(layer.get_weights())])
    return layer


def _gru(**options):
    return keras.layers.GRU(H, return_sequences=True, dtype="float64", **options)


@pytest.mark.parametrize("use_bias", [True, False])
@pytest.mark.parametrize("reset_after", [True, False])
def test_read_and_write(reset_after, use_bias):
    single = _build(_gru(reset_after=reset_after, use_bias=use_bias))
    backwards = _build(_gru(reset_after=reset_after, use_bias=use_bias, go_backwards=True))
    both = _build(keras.layers.Bidirectional(_gru(reset_after=reset_after, use_bias=use_bias), dtype="float64"))
    layers = convert.read_gru(single, backwards, both)
    expected = [single(X), jnp.flip(jnp.asarray(backwards(X)), 1), both(X)]
    for layer, reference in zip(layers, expected, strict=True):
        y = layer(X, time_major=False)[0].reshape(B, T, -1)
        np.testing.assert_allclose(y, reference, rtol=0, atol=1e-6)  # Keras rounds the gate n to float32
    written = convert.write_gru(layers)
    assert_same_bits(written, tuple(layer.get_weights() for layer in (single, backwards, both)))
    lists = convert.read_gru(single.get_weights(), both.get_weights(), reset_after=reset_after)
    assert_same_bits(lists, (layers[0], layers[2]))


def test_errors():
    with pytest.raises(ValueError, match="must have activation='tanh', got 'relu'"):
        convert.read_gru(_build(_gru(activation="relu")))
    with pytest.raises(ValueError, match=r"must be a built keras.layers.GRU, got LSTM"):
        convert.read_gru(keras.layers.LSTM(H))
    arrays = _build(_gru()).get_weights()
    with pytest.raises(ValueError, match="reset_after must be given for a list without bias"):
        convert.read_gru(arrays[:2])
    with pytest.raises(ValueError, match=r"reset_after=False does not have a bias of shape \(2, 12\)"):
        convert.read_gru(arrays, reset_after=False)
    assert jax.tree.leaves(convert.read_gru(arrays[:2], reset_after=True))
