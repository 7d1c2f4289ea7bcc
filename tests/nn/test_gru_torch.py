"""`jaxgrad.nn.GRU` equals `torch.nn.GRU` in values and gradients."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from converted_gru import B, H, I, T, normal

from jaxgrad import nn
from jaxgrad.convert import torch as convert

torch = pytest.importorskip("torch")

LENGTHS = np.array([T, 2, 4])


def _of_torch(gru, x, hx, lengths):
    if lengths is None:
        return gru(x, hx)
    pad = {"batch_first": gru.batch_first}
    packed = torch.nn.utils.rnn.pack_padded_sequence(x, torch.from_numpy(lengths), enforce_sorted=False, **pad)
    output, h_n = gru(packed, hx)
    return torch.nn.utils.rnn.pad_packed_sequence(output, total_length=T, **pad)[0], h_n


@pytest.mark.parametrize("lengths", [None, LENGTHS], ids=["full", "ragged"])
@pytest.mark.parametrize(
    "options",
    [{}, {"num_layers": 3, "batch_first": True}, {"num_layers": 2, "bidirectional": True}, {"bias": False}],
    ids=str,
)
def test_values_and_gradients(options, lengths):
    torch.manual_seed(0)
    gru = torch.nn.GRU(I, H, **options, dtype=torch.float64)
    batch_first = options.get("batch_first", False)
    x = normal(*((B, T) if batch_first else (T, B)), I)
    hx = normal(options.get("num_layers", 1) * (2 if options.get("bidirectional") else 1), B, H)
    tensors = [torch.tensor(array, requires_grad=True) for array in (x, hx)]
    expected = _of_torch(gru, *tensors, lengths)
    cotangents = [normal(*e.shape, seed=1) for e in expected]
    torch.autograd.backward(expected, [torch.from_numpy(c) for c in cotangents])

    layer = nn.GRU.from_weights(convert.read_gru(gru.state_dict()), batch_first=batch_first)
    run = jax.jit(lambda layer, x, hx: jax.vjp(lambda *args: args[0](*args[1:], sequence_lens=lengths), layer, x, hx))
    found, pullback = run(layer, x, hx)
    of_layer, *of_inputs = pullback(tuple(map(jnp.asarray, cotangents)))
    for a, e in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, e.detach().numpy(), rtol=0, atol=1e-12)
    for a, e in zip(of_inputs, tensors, strict=True):
        np.testing.assert_allclose(a, e.grad.numpy(), rtol=0, atol=1e-10)
    for key, gradient in convert.write_gru(of_layer.layers).items():
        np.testing.assert_allclose(gradient, getattr(gru, key).grad.numpy(), rtol=0, atol=1e-10)


def test_same_tree():
    """A layer of the same arguments has the same tree as the converted one: a checkpoint of either fits."""
    gru = torch.nn.GRU(I, H, 2, bidirectional=True)
    own = nn.GRU(I, H, 2, bidirectional=True, key=jax.random.key(0))
    converted = nn.GRU.from_weights(convert.read_gru(gru.state_dict()))
    assert jax.tree.structure(own) == jax.tree.structure(converted)
    assert [a.shape for a in jax.tree.leaves(own)] == [a.shape for a in jax.tree.leaves(converted)]
