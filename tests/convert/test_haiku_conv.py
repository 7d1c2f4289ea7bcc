"""Convolutions of Haiku, against their own values and gradients."""

from __future__ import annotations

import haiku as hk
import jax
import pytest
from converted_gru import random_like
from converted_layers import check_record, images
from thorough import oldest_one_in

from jaxgrad.convert import haiku as convert

pytestmark = pytest.mark.jax_version

CASES = {
    "strides": (hk.Conv2D, (9, 7), {"kernel_shape": (3, 2), "stride": (2, 3)}),
    "channels first, pairs": (
        hk.Conv2D,
        (9, 7),
        {"kernel_shape": (3, 2), "padding": ((1, 0), (2, 1)), "data_format": "NC..."},
    ),
    "causal": (hk.Conv1D, (23,), {"kernel_shape": 3, "rate": 2, "padding": hk.pad.causal}),
    "groups": (hk.Conv2D, (9, 7), {"kernel_shape": 3, "feature_group_count": 4, "padding": "VALID"}),
}
TRANSPOSED = {
    "same": (hk.Conv2DTranspose, (5, 4), {"kernel_shape": (3, 2), "stride": (2, 3)}),
    "valid": (hk.Conv2DTranspose, (5, 4), {"kernel_shape": (2, 3), "stride": 3, "padding": "VALID"}),
    "channels first": (
        hk.Conv1DTranspose,
        (7,),
        {"kernel_shape": 4, "stride": 2, "padding": ((2, 1),), "data_format": "channels_first"},
    ),
}
EVERY = [(name, cases is TRANSPOSED) for cases in (CASES, TRANSPOSED) for name in cases]


@pytest.mark.parametrize(("name", "transpose"), oldest_one_in(3, EVERY, several=True))
def test_layers(name, transpose):
    kind, spatial, settings = (TRANSPOSED if transpose else CASES)[name]
    module = hk.without_apply_rng(hk.transform(lambda x: kind(12, **settings, name="conv")(x)))
    x = images(*spatial, channels_last="data_format" not in settings)
    params = random_like(module.init(jax.random.key(0), x))["conv"]
    read, write = (getattr(convert, f"{verb}_conv{'_transpose' * transpose}") for verb in ("read", "write"))
    arguments = {name: value for name, value in settings.items() if name != "kernel_shape"}
    check_record(read(params, **arguments), write, params, lambda p, x: module.apply({"conv": p}, x), x)


def test_depthwise():
    module = hk.without_apply_rng(hk.transform(lambda x: hk.DepthwiseConv2D(2, 3, stride=2, name="conv")(x)))
    x = images(9, 7)
    params = random_like(module.init(jax.random.key(0), x))["conv"]
    record = convert.read_conv(params, stride=2, feature_group_count=8)
    check_record(record, convert.write_conv, params, lambda p, x: module.apply({"conv": p}, x), x)


def test_errors():
    with pytest.raises(ValueError, match=r"parameters must have w and perhaps b, .* got \['conv'\]"):
        convert.read_conv({"conv": {"w": 0}})
    w = images(3, 3, features=4, n=3)
    with pytest.raises(ValueError, match="padding must be one of 'SAME', 'SAME_LOWER', 'VALID', got 'FULL'"):
        convert.read_conv({"w": w}, padding="full")
    with pytest.raises(ValueError, match=r"data_format must be one of Haiku's, .* got 'HWN'"):
        convert.read_conv({"w": w}, data_format="HWN")
    for data_format in ("channels_last", "channels_first", "N...C", "NC...", "NCHW", "NHWC", "NCW", "NDHWC"):
        channels_last = convert.read_conv({"w": w}, data_format=data_format).channels_last
        assert channels_last == (hk.get_channel_index(data_format) == -1), data_format
    record = convert.read_conv_transpose({"w": images(3, features=4, n=2)})
    grouped = type(record)(record.kernel, None, **{**_settings(record), "groups": 2})
    with pytest.raises(ValueError, match=r"weights must have groups=1 and dilation 1, got 2 and \(1,\)"):
        convert.write_conv_transpose(grouped)


def _settings(record):
    names = ("strides", "padding", "output_padding", "dilation", "groups", "channels_last")
    return {name: getattr(record, name) for name in names}
