"""`jaxgrad.nn.GRU`: its arguments, dropout and initial weights. test_gru_torch.py compares it with PyTorch."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from converted_gru import B, H, I, T, normal

from jaxgrad import nn

pytestmark = pytest.mark.jax_version

X = jnp.asarray(normal(T, B, I))
KEY = jax.random.key(0)


def _gru(**options):
    return nn.GRU(I, H, dtype=jnp.float64, key=KEY, **options)


def test_initial_weights():
    gru = nn.GRU(64, 256, 2, bidirectional=True, key=KEY)
    assert [leaf.shape for leaf in jax.tree.leaves(gru.layers[1])] == [(2, 768, 512), (2, 768, 256), (2, 768), (2, 768)]
    for leaf in jax.tree.leaves(gru):
        assert leaf.dtype == jnp.float32
        np.testing.assert_allclose([leaf.min(), leaf.max(), leaf.std()], [-1 / 16, 1 / 16, 1 / 16 / 3**0.5], rtol=0.04)
    flat = [np.asarray(leaf).ravel()[:4] for leaf in jax.tree.leaves(gru)]
    assert len({leaf.tobytes() for leaf in flat}) == 8
    assert [leaf.shape for leaf in jax.tree.leaves(_gru(bias=False))] == [(1, 12, I), (1, 12, H)]
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_flatten_with_path(gru)[0]]
    assert paths[:3] == [".layers[0].w", ".layers[0].r", ".layers[0].wb"]


def test_resets():
    """A reset in both layers is the beginning of a sequence."""
    gru = _gru(num_layers=2)
    reset = np.zeros((T, B), bool)
    reset[4] = True
    output, h_n = gru(X, normal(2, B, H), reset=reset)
    last, last_h = gru(X[4:])
    np.testing.assert_allclose(output[4:], last, rtol=0, atol=1e-12)
    np.testing.assert_allclose(h_n, last_h, rtol=0, atol=1e-12)


def test_layouts():
    """Batch first, and without a batch."""
    gru, reset = _gru(num_layers=2, bidirectional=True), np.random.default_rng(0).random((T, B)) < 0.3
    hx = normal(4, B, H)
    output, h_n = gru(X, hx, reset=reset)
    other = nn.GRU.from_weights(gru.layers, batch_first=True)
    found, found_h = other(X.swapaxes(0, 1), hx, reset=reset.T)
    np.testing.assert_allclose(found, output.swapaxes(0, 1), rtol=0, atol=1e-12)
    np.testing.assert_allclose(found_h, h_n, rtol=0, atol=1e-12)
    for layer in (gru, other):
        found, found_h = layer(X[:, 1], hx[:, 1], reset=reset[:, 1])
        np.testing.assert_allclose(found, output[:, 1], rtol=0, atol=1e-12)
        np.testing.assert_allclose(found_h, h_n[:, 1], rtol=0, atol=1e-12)


def test_dropout():
    gru = _gru(num_layers=3, dropout=0.5)
    run = jax.jit(lambda gru, key: gru(X, key=key)[0])
    np.testing.assert_array_equal(run(gru, KEY), run(gru, KEY))
    assert (np.asarray(run(gru, KEY)) != np.asarray(run(gru, jax.random.key(1)))).mean() > 0.9
    nothing = nn.GRU.from_weights(gru.layers, dropout=1.0)
    zeros = jnp.zeros((T, B, H))
    expected = nn.GRU.from_weights(gru.layers[2:])(zeros)[0]
    np.testing.assert_allclose(nothing(X, key=KEY)[0], expected, rtol=0, atol=1e-12)
    np.testing.assert_array_equal(nothing(X)[0], gru(X)[0])
    first_layer = [nothing(X, key=key)[1][0] for key in (KEY, None)]
    np.testing.assert_array_equal(*first_layer)  # x itself is not dropped


def test_dropout_keeps_the_mean():
    """With small input weights the second layer is almost linear, so that the mean over many keys shows the scale."""
    first, second = _gru(num_layers=2).layers
    small = jax.tree.map(lambda a: a * 0.01, second)
    gru = nn.GRU.from_weights((first, small), dropout=0.5)
    mean = jax.jit(jax.vmap(lambda key: gru(X, key=key)[0]))(jax.random.split(KEY, 2000)).mean(0)
    expected = np.asarray(gru(X)[0])
    np.testing.assert_allclose(mean, expected, rtol=0, atol=0.05 * np.abs(expected).max())


def test_errors():
    with pytest.raises(ValueError, match=r"jaxgrad.nn.GRU: hidden_size must be positive, got 0"):
        nn.GRU(I, 0, key=KEY)
    with pytest.raises(ValueError, match=r"dropout must lie in \[0, 1\], got 2"):
        _gru(dropout=2)
    with pytest.raises(ValueError, match=r"hx must have the shape \[L \* D, B, H\] = \(1, 3, 4\), got \(2, 3, 4\)"):
        _gru()(X, normal(2, B, H))
    with pytest.raises(ValueError, match=r"must be that of the output of the layer below, 4, got 5"):
        nn.GRU.from_weights(_gru().layers * 2)
    with pytest.raises(ValueError, match=r"jaxgrad.nn.GRU: weights must have at least one GRUWeights, got \[\]"):
        nn.GRU.from_weights([])
    with pytest.warns(UserWarning, match="dropout=0.5 has no effect with a single layer"):
        _gru(dropout=0.5)
