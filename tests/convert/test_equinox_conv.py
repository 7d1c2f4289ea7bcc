"""Convolutions of equinox, against their own values and gradients."""

from __future__ import annotations

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from converted_gru import random_like
from converted_layers import check_record, images
from thorough import oldest_one_in

from jaxgrad.convert import equinox as convert

pytestmark = pytest.mark.jax_version

CASES = {
    "strides": (2, (9, 7), {"kernel_size": (3, 2), "stride": (2, 3), "padding": "SAME"}),
    "lower": (2, (9, 7), {"kernel_size": (4, 2), "padding": "SAME_LOWER"}),
    "dilation, no bias": (2, (9, 7), {"kernel_size": 3, "padding": 1, "dilation": 2, "use_bias": False}),
    "pairs, groups": (2, (9, 7), {"kernel_size": (3, 2), "padding": ((1, 0), (2, 1)), "groups": 4}),
    "one dimension": (1, (23,), {"kernel_size": 3, "stride": 2}),
    "three dimensions": (3, (5, 4, 6), {"kernel_size": (3, 2, 3), "padding": 1}),
}
TRANSPOSED = {
    "output padding": (2, (5, 4), {"kernel_size": (3, 4), "stride": 2, "padding": 1, "output_padding": (1, 0)}),
    "same": (2, (5, 4), {"kernel_size": (4, 3), "stride": (2, 3), "padding": "SAME"}),
    "lower": (2, (5, 4), {"kernel_size": (4, 2), "stride": (3, 1), "padding": "SAME_LOWER", "output_padding": (2, 0)}),
    "valid": (2, (5, 4), {"kernel_size": (2, 3), "stride": 3, "padding": "VALID", "output_padding": 1}),
    "groups": (2, (5, 4), {"kernel_size": (3, 2), "stride": 2, "groups": 4, "use_bias": False}),
    "dilation": (1, (7,), {"kernel_size": 3, "stride": 2, "dilation": 2, "padding": ((1, 2),)}),
}


EVERY = [(name, cases is TRANSPOSED) for cases in (CASES, TRANSPOSED) for name in cases]


@pytest.mark.parametrize(("name", "transpose"), oldest_one_in(3, EVERY, several=True))
def test_layers(name, transpose):
    rank, spatial, settings = (TRANSPOSED if transpose else CASES)[name]
    kind = eqx.nn.ConvTranspose if transpose else eqx.nn.Conv
    layer = random_like(kind(rank, 8, 12, **settings, dtype=jnp.float64, key=jax.random.key(0)))
    read, write = (getattr(convert, f"{verb}_conv{'_transpose' * transpose}") for verb in ("read", "write"))
    x = images(*spatial, channels_last=False)
    check_record(read(layer), lambda record: write(record, layer), layer, lambda layer, x: jax.vmap(layer)(x), x)
    # One example, as equinox takes it.
    assert read(layer)(x[0]).shape == layer(x[0]).shape


def test_errors():
    layer = eqx.nn.Conv2d(8, 12, 3, padding=1, key=jax.random.key(0))
    record = convert.read_conv(layer)
    other = eqx.nn.Conv2d(8, 12, 3, padding=2, key=jax.random.key(0))
    with pytest.raises(ValueError, match=r"weights must have padding = \(\(2, 2\), \(2, 2\)\) of the layer, got"):
        convert.write_conv(record, other)
    with pytest.raises(TypeError, match=r"layer must be an equinox.nn.ConvTranspose, got Conv2d"):
        convert.read_conv_transpose(layer)
    circular = eqx.nn.Conv2d(8, 12, 3, padding=1, padding_mode="CIRCULAR", key=jax.random.key(0))
    with pytest.raises(ValueError, match="layer must have padding_mode='ZEROS', got 'CIRCULAR'"):
        convert.read_conv(circular)
