"""State dicts of PyTorch's convolutions, against their own values and gradients."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from converted_gru import assert_same_bits
from converted_layers import images, loss

from jaxgrad.convert import torch as convert

torch = pytest.importorskip("torch")

CASES = {
    "strides": ("Conv2d", (9, 7), {"kernel_size": (3, 2), "stride": (2, 3), "padding": (1, 0)}),
    "same, groups": ("Conv2d", (9, 7), {"kernel_size": (4, 3), "padding": "same", "dilation": (1, 2), "groups": 4}),
    "no bias": ("Conv1d", (23,), {"kernel_size": 3, "padding": "valid", "dilation": 2, "bias": False}),
    "three dimensions": ("Conv3d", (5, 4, 6), {"kernel_size": (3, 2, 3), "stride": 2}),
}
TRANSPOSED = {
    "output padding": (
        "ConvTranspose2d",
        (5, 4),
        {"kernel_size": (3, 4), "stride": 2, "padding": (1, 2), "output_padding": (1, 0)},
    ),
    "groups, dilation": (
        "ConvTranspose2d",
        (5, 4),
        {"kernel_size": (3, 2), "stride": (2, 3), "groups": 4, "dilation": (2, 1)},
    ),
    "no bias": ("ConvTranspose1d", (7,), {"kernel_size": 5, "stride": 3, "padding": 1, "bias": False}),
}
EVERY = [(name, cases is TRANSPOSED) for cases in (CASES, TRANSPOSED) for name in cases]


@pytest.mark.parametrize(("name", "transpose"), EVERY)
def test_read_and_write(name, transpose):
    kind, spatial, settings = (TRANSPOSED if transpose else CASES)[name]
    torch.manual_seed(0)
    layer = getattr(torch.nn, kind)(8, 12, **settings, dtype=torch.float64)
    model = torch.nn.ModuleDict({"up": layer, "head": torch.nn.Linear(2, 2)})
    read, write = (getattr(convert, f"{verb}_conv{'_transpose' * transpose}") for verb in ("read", "write"))
    arguments = {name: value for name, value in settings.items() if name not in ("kernel_size", "bias")}
    record = read(model.state_dict(), "up.", **arguments)
    own = {f"up.{key}": value.numpy() for key, value in layer.state_dict().items()}
    assert_same_bits(write(record, "up."), own)

    x = images(*spatial, channels_last=False)
    expected = layer(torch.from_numpy(x))
    assert_same_bits(record(x)[1], record(x[1]))

    def run(record):
        y = record(x)
        return loss(y), y

    gradient, y = jax.jit(jax.grad(run, has_aux=True))(record)
    np.testing.assert_allclose(y, expected.detach(), rtol=0, atol=1e-12)
    expected.backward(torch.cos(torch.arange(expected.numel(), dtype=torch.float64)).reshape(expected.shape))
    for key, array in write(gradient).items():
        np.testing.assert_allclose(array, getattr(layer, key).grad, rtol=0, atol=1e-10)
    trained = jax.tree.map(lambda a, g: a - 0.1 * g, record, gradient)
    layer.load_state_dict({key: torch.from_dlpack(array) for key, array in write(trained).items()})
    np.testing.assert_allclose(layer(torch.from_numpy(x)).detach(), trained(x), rtol=0, atol=1e-11)


def test_bfloat16():
    layer = torch.nn.Conv2d(8, 12, 3, dtype=torch.bfloat16)
    record = convert.read_conv(layer.state_dict())
    assert record.kernel.dtype == jnp.bfloat16
    assert record(images(5, 6, channels_last=False).astype(jnp.bfloat16)).dtype == jnp.bfloat16
    for key, array in convert.write_conv(record).items():
        assert torch.equal(torch.from_dlpack(array), getattr(layer, key).detach())


def test_errors():
    state_dict = torch.nn.ModuleDict({"up": torch.nn.Conv2d(8, 12, 3)}).state_dict()
    with pytest.raises(ValueError, match=r"state_dict has no weight; prefixes with 'weight' in it: \['up.'\]"):
        convert.read_conv(state_dict)
    with pytest.raises(TypeError, match="state_dict must be a mapping, got Conv2d; of a module, call state_dict"):
        convert.read_conv(torch.nn.Conv2d(8, 12, 3))
    with pytest.raises(ValueError, match=r"weight must have rank 3 or more, .* got \(2, 3\)"):
        convert.read_conv(torch.nn.Linear(3, 2).state_dict())
    with pytest.raises(ValueError, match="groups must divide the 12 output features, got 5"):
        convert.read_conv(state_dict, "up.", groups=5)
    with pytest.raises(ValueError, match="stride must be an int or 2 ints, got"):
        convert.read_conv(state_dict, "up.", stride=(1, 2, 3))
    with pytest.raises(ValueError, match=r"stride must be an int or 2 ints, got 1\.5"):
        convert.read_conv(state_dict, "up.", stride=1.5)
    with pytest.raises(ValueError, match="stride must be at least 1, got 0"):
        convert.read_conv(state_dict, "up.", stride=0)
    with pytest.raises(ValueError, match=r"dilation must be at least 1, got \(1, -1\)"):
        convert.read_conv(state_dict, "up.", dilation=(1, -1))
    with pytest.raises(TypeError, match="groups must be an int, got float"):
        convert.read_conv(state_dict, "up.", groups=1.0)
    with pytest.raises(ValueError, match=r"padding must be an int, or 2 ints or pairs .* got \(0.5, 1\)"):
        convert.read_conv(state_dict, "up.", padding=(0.5, 1))
    with pytest.raises(ValueError, match="padding must be 'same', 'valid', an int or 2 ints, got 'circular'"):
        convert.read_conv(state_dict, "up.", padding="circular")
