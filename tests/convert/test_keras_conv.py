"""Convolutions of Keras 3 on JAX, against their own values and gradients."""

from __future__ import annotations

import numpy as np
import pytest
from converted_gru import normal
from converted_layers import check_record, images

keras = pytest.importorskip("keras")

from jaxgrad.convert import keras as convert  # noqa: E402

CASES = {
    "strides": ("Conv2D", (9, 7), {"kernel_size": (3, 2), "strides": (2, 3), "padding": "same"}),
    "channels first, groups": (
        "Conv2D",
        (9, 7),
        {"kernel_size": (3, 2), "groups": 4, "data_format": "channels_first", "use_bias": False},
    ),
    "causal": ("Conv1D", (23,), {"kernel_size": 3, "padding": "causal", "dilation_rate": 2}),
    "depthwise": ("DepthwiseConv2D", (9, 7), {"kernel_size": (3, 2), "depth_multiplier": 2, "padding": "same"}),
}
TRANSPOSED = {
    "same": ("Conv2DTranspose", (5, 4), {"kernel_size": (3, 2), "strides": (2, 3), "padding": "same"}),
    "same, output padding": (
        "Conv2DTranspose",
        (5, 4),
        {"kernel_size": (3, 4), "strides": (2, 3), "padding": "same", "output_padding": (1, 2)},
    ),
    "valid, strides larger than the window": (
        "Conv2DTranspose",
        (5, 4),
        {"kernel_size": (2, 3), "strides": 3, "use_bias": False},
    ),
    "valid, output padding": (
        "Conv1DTranspose",
        (7,),
        {"kernel_size": 4, "strides": 3, "output_padding": 2, "data_format": "channels_first"},
    ),
    "dilation": ("Conv1DTranspose", (7,), {"kernel_size": 3, "dilation_rate": 2}),
}
EVERY = [(name, cases is TRANSPOSED) for cases in (CASES, TRANSPOSED) for name in cases]


@pytest.mark.parametrize(("name", "transpose"), EVERY)
def test_layers(name, transpose):
    kind, spatial, settings = (TRANSPOSED if transpose else CASES)[name]
    features = () if kind == "DepthwiseConv2D" else (12,)
    layer = getattr(keras.layers, kind)(*features, **settings, dtype="float64")
    x = images(*spatial, channels_last="data_format" not in settings)
    layer.build(x.shape)
    layer.set_weights([normal(*w.shape, seed=i) for i, w in enumerate(layer.get_weights())])
    read, write = (getattr(convert, f"{verb}_conv{'_transpose' * transpose}") for verb in ("read", "write"))
    arguments = {"depthwise": True} if kind == "DepthwiseConv2D" else {}

    def own(weights, x):
        return layer.stateless_call(weights, [], x)[0]

    check_record(read(layer), lambda record: write(record, **arguments), layer.get_weights(), own, x)


def test_errors():
    layer = keras.layers.Conv2D(4, 3)
    with pytest.raises(ValueError, match="layer must be a built Conv layer of Keras, got Conv2D"):
        convert.read_conv(layer)
    layer.build((None, 5, 5, 4))
    with pytest.raises(ValueError, match="layer must be a built ConvTranspose layer of Keras, got Conv2D"):
        convert.read_conv_transpose(layer)
    with pytest.raises(ValueError, match=r"weights must have one input feature in each group for .*, got 4"):
        convert.write_conv(convert.read_conv(layer), depthwise=True)
    assert np.shape(convert.write_conv(convert.read_conv(layer))[0]) == (3, 3, 4, 4)
