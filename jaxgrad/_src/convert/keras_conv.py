"""Convolutions of Keras 3: `keras.layers.Conv1D` to `Conv3D`, their transposes, and depthwise convolutions."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from jaxgrad._src.convert.arrays import as_jax
from jaxgrad._src.convert.conv_weights import (
    ConvTransposeWeights,
    ConvWeights,
    Padding,
    causal_padding,
    check_arrays,
    dilated_padding,
    repeat,
    window_extents,
)
from jaxgrad._src.convert.records import check_record

_MODULE = "jaxgrad.convert.keras"


def read_conv(layer: Any) -> ConvWeights:
    """Reads a built `keras.layers.Conv1D`, `Conv2D`, `Conv3D`, `DepthwiseConv1D` or `DepthwiseConv2D`.

    The activation of the layer is an argument of the record's call.

    Raises:
      ValueError: layer is not such a layer, or is not built.
    """
    function = f"{_MODULE}.read_conv"
    kernel, bias = _read(function, layer, "Conv")
    groups = getattr(layer, "groups", 1)
    if hasattr(layer, "depth_multiplier"):
        groups = kernel.shape[-2]
        kernel = kernel.reshape(*kernel.shape[:-2], 1, -1)
    check_arrays(function, kernel, bias, groups, transposed=False)
    n = kernel.ndim - 2
    dilation = repeat(function, "dilation_rate", layer.dilation_rate, n)
    padding: Padding = layer.padding.upper()
    if padding == "CAUSAL":
        padding = causal_padding(kernel, dilation)
    return ConvWeights(
        kernel,
        bias,
        strides=repeat(function, "strides", layer.strides, n),
        padding=padding,
        dilation=dilation,
        groups=groups,
        channels_last=layer.data_format == "channels_last",
    )


def write_conv(weights: ConvWeights, *, depthwise: bool = False) -> list[np.ndarray]:
    """Returns the weights of a convolution of Keras, for `layer.set_weights`.

    Args:
      weights: the record.
      depthwise: whether the layer is a `DepthwiseConv1D` or `DepthwiseConv2D`, whose kernel has another shape.

    Raises:
      TypeError: weights are not `ConvWeights`.
      ValueError: depthwise is given, but the groups have more than one input feature.
    """
    function = f"{_MODULE}.write_conv"
    check_record(function, weights, ConvWeights)
    kernel = weights.kernel
    if depthwise:
        if kernel.shape[-2] != 1:
            raise ValueError(
                f"{function}: weights must have one input feature in each group for depthwise=True, "
                f"got {kernel.shape[-2]}"
            )
        kernel = kernel.reshape(*kernel.shape[:-2], weights.groups, -1)
    return _write(kernel, weights.bias)


def read_conv_transpose(layer: Any) -> ConvTransposeWeights:
    """Reads a built `keras.layers.Conv1DTranspose`, `Conv2DTranspose` or `Conv3DTranspose`.

    The activation of the layer is an argument of the record's call. The record computes as the backends JAX and
    TensorFlow of Keras do.

    Raises:
      ValueError: layer is not such a layer, or is not built.
    """
    function = f"{_MODULE}.read_conv_transpose"
    kernel, bias = _read(function, layer, "ConvTranspose")
    check_arrays(function, kernel, bias, 1, transposed=True)
    n = kernel.ndim - 2
    dilation = repeat(function, "dilation_rate", layer.dilation_rate, n)
    strides = repeat(function, "strides", layer.strides, n)
    added = (
        None if layer.output_padding is None else repeat(function, "output_padding", layer.output_padding, n, least=0)
    )
    pads = [
        _dilated_padding(extent, stride, layer.padding, None if added is None else added[i])
        for i, (extent, stride) in enumerate(zip(window_extents(kernel, dilation), strides, strict=True))
    ]
    return ConvTransposeWeights(
        kernel,
        bias,
        strides=strides,
        padding=dilated_padding(kernel, dilation, pads),
        output_padding=(0,) * n,
        dilation=dilation,
        groups=1,
        channels_last=layer.data_format == "channels_last",
    )


def _dilated_padding(extent: int, stride: int, padding: str, output_padding: int | None) -> tuple[int, int]:
    """The padding of the dilated input.

    The result has size * stride positions for "same", and (size - 1) * stride + max(extent, stride) for "valid";
    with output padding (size - 1) * stride + extent % 2 and + extent, and the output padding.
    """
    if padding == "valid":
        added = max(stride - extent, 0) if output_padding is None else output_padding
        return extent - 1, extent - 1 + added
    total = stride + extent - 2 if output_padding is None else extent + extent % 2 - 2 + output_padding
    low = min(-(-total // 2), extent - 1)
    return low, total - low


def write_conv_transpose(weights: ConvTransposeWeights) -> list[np.ndarray]:
    """Returns the weights of a transposed convolution of Keras, for `layer.set_weights`.

    Raises:
      TypeError: weights are not `ConvTransposeWeights`.
      ValueError: weights have groups, which the layer does not have.
    """
    function = f"{_MODULE}.write_conv_transpose"
    check_record(function, weights, ConvTransposeWeights)
    if weights.groups != 1:
        raise ValueError(
            f"{function}: weights must have groups=1, as transposed convolutions of Keras, got {weights.groups}"
        )
    return _write(weights.kernel, weights.bias)


def _read(function: str, layer: Any, kind: str) -> tuple[jax.Array, jax.Array | None]:
    is_transpose = hasattr(layer, "output_padding")
    arguments = ("kernel", "strides", "dilation_rate", "data_format")
    if not all(hasattr(layer, name) for name in arguments) or is_transpose != (kind == "ConvTranspose"):
        raise ValueError(f"{function}: layer must be a built {kind} layer of Keras, got {type(layer).__name__}")
    bias = getattr(layer, "bias", None)
    return as_jax(function, "kernel", layer.kernel), None if bias is None else as_jax(function, "bias", bias)


def _write(kernel: jax.Array, bias: jax.Array | None) -> list[np.ndarray]:
    return [np.asarray(array) for array in (kernel, bias) if array is not None]
