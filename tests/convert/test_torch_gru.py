"""State dicts of `torch.nn.GRU`, against its own forward pass and gradients."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from converted_gru import B, H, I, T, assert_same_bits, normal

from jaxgrad.convert import torch as convert

torch = pytest.importorskip("torch")


def _run(layers, x):
    """`(output, h_n)` of the records, in PyTorch's shapes."""
    states = []
    for layer in layers:
        y, y_h = layer(x)
        x = jnp.moveaxis(y, 1, 2).reshape(*x.shape[:2], -1)
        states.append(y_h)
    return x, jnp.concatenate(states)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("num_layers", "bidirectional"), [(1, False), (3, False), (2, True)])
def test_read_and_write(num_layers, bidirectional, bias):
    torch.manual_seed(0)
    gru = torch.nn.GRU(I, H, num_layers, bias=bias, bidirectional=bidirectional, dtype=torch.float64)
    model = torch.nn.ModuleDict({"encoder": torch.nn.ModuleDict({"gru": gru}), "head": torch.nn.Linear(H, 2)})
    x = normal(T, B, I)
    expected = gru(torch.from_numpy(x))
    layers = convert.read_gru(model.state_dict(), "encoder.gru.")
    assert len(layers) == num_layers
    for actual, reference in zip(_run(layers, x), expected, strict=True):
        np.testing.assert_allclose(actual, reference.detach().numpy(), rtol=0, atol=1e-12)

    written = convert.write_gru(layers, "encoder.gru.")
    own = {key: value for key, value in model.state_dict().items() if not key.startswith("head")}
    assert_same_bits(written, {key: value.numpy() for key, value in own.items()})
    # A trained record is loaded by the module.
    gradients = jax.grad(lambda layers: (_run(layers, x)[0] ** 2).sum())(layers)
    (expected[0] ** 2).sum().backward()
    for key, gradient in convert.write_gru(gradients).items():
        np.testing.assert_allclose(gradient, getattr(gru, key).grad.numpy(), rtol=0, atol=1e-10)
    trained = jax.tree.map(lambda a, g: a - 0.1 * g, layers, gradients)
    tensors = {key: torch.from_dlpack(array) for key, array in convert.write_gru(trained).items()}
    gru.load_state_dict(tensors)
    np.testing.assert_allclose(gru(torch.from_numpy(x))[0].detach(), _run(trained, x)[0], rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_dtypes(dtype):
    gru = torch.nn.GRU(I, H, dtype=getattr(torch, dtype))
    (layer,) = convert.read_gru(gru.state_dict())
    assert {leaf.dtype.name for leaf in jax.tree.leaves(layer)} == {dtype}
    for key, array in convert.write_gru(layer).items():
        assert torch.equal(torch.from_dlpack(array), getattr(gru, key).detach())


def test_reading_copies():
    gru = torch.nn.GRU(I, H)
    (layer,) = convert.read_gru(gru.state_dict())
    before = np.array(layer.rb)
    with torch.no_grad():
        gru.bias_hh_l0 += 1
    np.testing.assert_array_equal(layer.rb, before)


def test_errors():
    state_dict = torch.nn.ModuleDict({"encoder": torch.nn.GRU(I, H)}).state_dict()
    with pytest.raises(ValueError, match=r"has no weight_ih_l0; prefixes with .weight_ih_l0. in it: \['encoder.'\]"):
        convert.read_gru(state_dict)
    with pytest.raises(TypeError, match="state_dict must be a mapping, got GRU; of a module, call state_dict"):
        convert.read_gru(torch.nn.GRU(I, H))
    with pytest.raises(ValueError, match=r"weight_ih_l0 must be a GRU, .* recurrent weights of \(16, 4\)"):
        convert.read_gru(torch.nn.LSTM(I, H).state_dict())
    with jax.enable_x64(False), pytest.raises(ValueError, match="weight_ih_l0 has the dtype float64"):
        convert.read_gru(torch.nn.GRU(I, H, dtype=torch.float64).state_dict())
