"""Convolutions of Haiku: the parameters of `hk.Conv1D` to `Conv3D`, their transposes, and `hk.DepthwiseConv2D`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxgrad._src.conv.call.geometry import transpose_padding
from jaxgrad._src.convert.arrays import as_jax
from jaxgrad._src.convert.conv_weights import (
    ConvTransposeWeights,
    ConvWeights,
    Padding,
    check_arrays,
    dilated_padding,
    padding_pairs,
    repeat,
    reverse_window,
    window_extents,
)
from jaxgrad._src.convert.haiku_layers import is_channels_last
from jaxgrad._src.convert.records import check_record
from jaxgrad._src.core import checks

_MODULE = "jaxgrad.convert.haiku"

PadFn = Callable[[int], tuple[int, int]]


def read_conv(
    parameters: Mapping[str, Any],
    *,
    stride: int | Sequence[int] = 1,
    rate: int | Sequence[int] = 1,
    padding: str | Sequence[int] | Sequence[tuple[int, int]] | PadFn | Sequence[PadFn] = "SAME",
    feature_group_count: int = 1,
    data_format: str = "channels_last",
) -> ConvWeights:
    """Reads the parameters of an `hk.Conv1D`, `Conv2D`, `Conv3D` or `DepthwiseConv2D`.

    Args:
      parameters: the parameters of the module, such as `params["conv2_d"]`: "w" and perhaps "b".
      stride: the strides of the window, an int or one for each spatial dimension.
      rate: the dilation of the window, an int or one for each spatial dimension.
      padding: a string, a pair or a function such as `hk.pad.causal` for all dimensions, or a sequence of pairs or
        functions, one for each dimension or one for all.
      feature_group_count: the number of groups. A depthwise convolution has a group for each input feature.
      data_format: the layout of the input, such as "channels_last", "channels_first", "NHWC" or "NCHW".

    Raises:
      TypeError: a parameter is not a floating-point array.
      ValueError: the parameters are not those of a convolution, or another argument does not fit them.
    """
    function = f"{_MODULE}.read_conv"
    kernel, bias = _read(function, parameters)
    check_arrays(function, kernel, bias, feature_group_count, transposed=False)
    n = kernel.ndim - 2
    dilation = repeat(function, "rate", rate, n)
    pads: Padding
    if isinstance(padding, str):
        checks.check_choice(function, "padding", padding.upper(), ("SAME", "SAME_LOWER", "VALID"))
        pads = padding.upper()
    else:
        pads = _padding(function, padding, window_extents(kernel, dilation))
    return ConvWeights(
        kernel,
        bias,
        strides=repeat(function, "stride", stride, n),
        padding=pads,
        dilation=dilation,
        groups=feature_group_count,
        channels_last=is_channels_last(function, data_format),
    )


def _padding(function: str, padding: Any, extents: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """n pairs from a pair or a function of the size of the dilated window, or from a sequence of one or n of them."""
    n = len(extents)
    is_single = not _is_sequence(padding) or isinstance(next(iter(padding), None), int)
    elements = (padding,) if is_single else padding
    elements = tuple(elements) * n if len(elements) == 1 else tuple(elements)
    pairs = [own(extent) if callable(own) else own for own, extent in zip(elements, extents, strict=False)]
    if len(elements) != n or not all(map(_is_sequence, pairs)):
        expected = f"a string, a pair (low, high), a function, or {n} pairs or functions"
        raise ValueError(f"{function}: padding must be {expected}, got {padding!r}")
    return padding_pairs(function, pairs, n)


def _is_sequence(value: Any) -> bool:
    return isinstance(value, Sequence) or (isinstance(value, np.ndarray) and value.ndim > 0)


def write_conv(weights: ConvWeights) -> dict[str, jax.Array]:
    """Returns the parameters of a convolution of Haiku, "w" and "b".

    Raises:
      TypeError: weights are not `ConvWeights`.
    """
    check_record(f"{_MODULE}.write_conv", weights, ConvWeights)
    return _write(weights.kernel, weights)


def read_conv_transpose(
    parameters: Mapping[str, Any],
    *,
    stride: int | Sequence[int] = 1,
    padding: str | Sequence[tuple[int, int]] = "SAME",
    data_format: str = "channels_last",
) -> ConvTransposeWeights:
    """Reads the parameters of an `hk.Conv1DTranspose`, `Conv2DTranspose` or `Conv3DTranspose` without `output_shape`.

    Args:
      parameters: the parameters of the module, such as `params["conv2_d_transpose"]`: "w" and perhaps "b".
      stride: the strides of the module, an int or one for each spatial dimension.
      padding: "SAME", "VALID" or pairs, as the module takes them.
      data_format: the layout of the input, such as "channels_last", "channels_first", "NHWC" or "NCHW".

    Raises:
      TypeError: a parameter is not a floating-point array.
      ValueError: the parameters are not those of a convolution, or another argument does not fit them.
    """
    function = f"{_MODULE}.read_conv_transpose"
    kernel, bias = _read(function, parameters)
    kernel = reverse_window(kernel)
    check_arrays(function, kernel, bias, 1, transposed=True)
    n = kernel.ndim - 2
    strides = repeat(function, "stride", stride, n)
    if isinstance(padding, str):
        checks.check_choice(function, "padding", padding, ("SAME", "VALID"))
        padding = [transpose_padding(k, s, padding) for k, s in zip(kernel.shape[:n], strides, strict=True)]
    return ConvTransposeWeights(
        kernel,
        bias,
        strides=strides,
        padding=dilated_padding(kernel, (1,) * n, padding_pairs(function, padding, n)),
        output_padding=(0,) * n,
        dilation=(1,) * n,
        groups=1,
        channels_last=is_channels_last(function, data_format),
    )


def write_conv_transpose(weights: ConvTransposeWeights) -> dict[str, jax.Array]:
    """Returns the parameters of a transposed convolution of Haiku, "w" and "b".

    Raises:
      TypeError: weights are not `ConvTransposeWeights`.
      ValueError: weights have groups or dilation, which the module does not have.
    """
    function = f"{_MODULE}.write_conv_transpose"
    check_record(function, weights, ConvTransposeWeights)
    if weights.groups != 1 or set(weights.dilation) != {1}:
        raise ValueError(
            f"{function}: weights must have groups=1 and dilation 1, got {weights.groups} and {weights.dilation}"
        )
    return _write(reverse_window(weights.kernel), weights)


def _read(function: str, parameters: Any) -> tuple[jax.Array, jax.Array | None]:
    if not isinstance(parameters, Mapping) or not {"w"} <= set(parameters) <= {"w", "b"}:
        found = list(parameters) if isinstance(parameters, Mapping) else type(parameters).__name__
        raise ValueError(f"{function}: parameters must have w and perhaps b, as a convolution of haiku, got {found}")
    bias = as_jax(function, "b", parameters["b"]).reshape(-1) if "b" in parameters else None
    return as_jax(function, "w", parameters["w"]), bias


def _write(kernel: jax.Array, weights: ConvWeights | ConvTransposeWeights) -> dict[str, jax.Array]:
    if weights.bias is None:
        return {"w": kernel}
    shape = (-1,) if weights.channels_last else (-1, *(1 for _ in weights.strides))
    return {"w": kernel, "b": weights.bias.reshape(shape)}
