"""Convolutions of flax, linen and nnx, against their own values and gradients."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from converted_gru import assert_same_bits, random_like
from converted_layers import check_record, images
from flax import nnx
from thorough import oldest_one_in

from jaxgrad.convert import flax as convert

pytestmark = pytest.mark.jax_version

WIDE = {"param_dtype": jnp.float64}
CASES = {
    "strides": ((9, 7), {"kernel_size": (3, 2), "strides": (2, 3)}),
    "one stride, no bias": ((9, 7), {"kernel_size": (3, 3), "strides": 2, "padding": 1, "use_bias": False}),
    "dilation": ((9, 7), {"kernel_size": (3, 2), "padding": ((1, 0), (2, 1)), "kernel_dilation": (2, 1)}),
    "valid, groups": ((9, 7), {"kernel_size": (3, 2), "padding": "VALID", "feature_group_count": 4}),
    "causal": ((23,), {"kernel_size": (3,), "padding": "CAUSAL", "kernel_dilation": 2}),
    "three dimensions": ((5, 4, 6), {"kernel_size": (3, 2, 3), "strides": (1, 2, 1)}),
}
TRANSPOSED = {
    "same": ((5, 4), {"kernel_size": (3, 2), "strides": (2, 3)}),
    "valid, strides larger than the window": ((5, 4), {"kernel_size": (2, 3), "strides": (3, 2), "padding": "VALID"}),
    "pairs": ((5, 4), {"kernel_size": (4, 3), "strides": (2, 1), "padding": ((2, 1), (1, 3)), "use_bias": False}),
    "transposed kernel": ((5, 4), {"kernel_size": (3, 2), "strides": (2, 2), "transpose_kernel": True}),
    "dilation": ((5, 4), {"kernel_size": (3, 2), "kernel_dilation": (1, 2), "strides": (2, 1)}),
    "one dimension": ((7,), {"kernel_size": (4,), "strides": (2,)}),
}


@pytest.mark.parametrize("name", oldest_one_in(3, CASES))
def test_linen(name):
    spatial, settings = CASES[name]
    layer, x = nn.Conv(12, **settings, **WIDE), images(*spatial)
    params = random_like(layer.init(jax.random.key(0), x)["params"])
    record = convert.read_conv({"params": params}, layer)
    check_record(record, convert.write_conv, params, lambda p, x: layer.apply({"params": p}, x), x)


@pytest.mark.parametrize("name", oldest_one_in(3, TRANSPOSED))
def test_linen_transpose(name):
    spatial, settings = TRANSPOSED[name]
    layer, x = nn.ConvTranspose(6, **settings, **WIDE), images(*spatial)
    params = random_like(layer.init(jax.random.key(0), x)["params"])

    def write(record):
        return convert.write_conv_transpose(record, transpose_kernel=layer.transpose_kernel)

    check_record(
        convert.read_conv_transpose(params, layer), write, params, lambda p, x: layer.apply({"params": p}, x), x
    )


@pytest.mark.parametrize("transpose", [False, True])
def test_nnx(transpose):
    x = images(9, 7)
    kind, settings = (nnx.ConvTranspose, {}) if transpose else (nnx.Conv, {"feature_group_count": 4})
    layer = kind(8, 12, (3, 2), (2, 3), **settings, **WIDE, rngs=nnx.Rngs(0))
    nnx.update(layer, random_like(nnx.state(layer, nnx.Param)))
    read, write = (getattr(convert, f"{verb}_conv{'_transpose' * transpose}") for verb in ("read", "write"))
    record = read(layer)
    assert_same_bits(read(nnx.state(layer), layer), record)
    graph, state = nnx.split(layer)
    check_record(record, write, nnx.to_pure_dict(state), lambda p, x: nnx.merge(graph, nnx.State(p))(x), x)
    trained = jax.tree.map(lambda a: 2 * a, record)
    nnx.update(layer, write(trained))
    np.testing.assert_allclose(layer(x), trained(x), rtol=0, atol=1e-12)


def test_errors():
    layer = nn.Conv(4, (3, 3), padding="CIRCULAR")
    params = layer.init(jax.random.key(0), images(5, 5).astype(np.float32))["params"]
    with pytest.raises(ValueError, match="layer must have padding with zeros, got 'CIRCULAR'"):
        convert.read_conv(params, layer)
    with pytest.raises(ValueError, match=r"layer must be a Conv of flax.linen or flax.nnx, .* got dict"):
        convert.read_conv(params)
    with pytest.raises(ValueError, match=r"the parameters must have 'kernel', got \['bias'\]"):
        convert.read_conv({"bias": params["bias"]}, layer)
    with pytest.raises(ValueError, match=r"the bias must have the shape \(4,\), got \(3,\)"):
        convert.read_conv({**params, "bias": jnp.ones(3)}, nn.Conv(4, (3, 3)))
    with pytest.raises(ValueError, match="layer must have input_dilation=1, got 2"):
        convert.read_conv(params, nn.Conv(4, (3, 3), input_dilation=2))
    with pytest.raises(ValueError, match="layer must have mask=None"):
        convert.read_conv(params, nn.Conv(4, (3, 3), mask=params["kernel"]))
    local = nn.ConvLocal(4, (3,), padding="VALID")
    unshared = jax.eval_shape(local.init, jax.random.key(0), images(9).astype(np.float32))["params"]
    kernel = jnp.ones(unshared["kernel"].shape)
    with pytest.raises(ValueError, match=r"the kernel_size of the layer, \(3,\), got a kernel of \(7, 24, 4\)"):
        convert.read_conv({"kernel": kernel}, local)
    record = convert.read_conv(params, nn.Conv(4, (3, 3)))
    with pytest.raises(TypeError, match="weights must be ConvTransposeWeights, got ConvWeights"):
        convert.write_conv_transpose(record)
