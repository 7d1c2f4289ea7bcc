"""Convolutions of flax: the parameters of `Conv` and `ConvTranspose` of linen and nnx."""

from __future__ import annotations

from typing import Any

import jax

from jaxgrad._src.conv.call.geometry import transpose_padding
from jaxgrad._src.convert.conv_weights import (
    ConvTransposeWeights,
    ConvWeights,
    Padding,
    causal_padding,
    check_arrays,
    dilated_padding,
    padding_pairs,
    repeat,
    reverse_window,
    swap_groups,
    window_extents,
)
from jaxgrad._src.convert.flax_layers import layer_of, read_parameter
from jaxgrad._src.convert.records import check_record

_MODULE = "jaxgrad.convert.flax"
_PADDINGS = ("SAME", "SAME_LOWER", "VALID")


def read_conv(parameters: Any, layer: Any = None) -> ConvWeights:
    """Reads a `Conv` of linen or nnx.

    Args:
      parameters: the parameters of the layer as a dictionary, with or without the collection "params"; or the state or
        the layer of nnx.
      layer: the layer of linen or nnx, whose arguments (strides, padding, ...) are not among the parameters. Not needed
        if `parameters` is a layer of nnx.

    Raises:
      TypeError: a parameter is not a floating-point array.
      ValueError: parameters or layer are not those of a `Conv`, the layer has another window than the parameters, as
        `ConvLocal` has, or it has a mask, input dilation, or padding other than zeros: "CIRCULAR" or "REFLECT".
    """
    function = f"{_MODULE}.read_conv"
    arguments = ("kernel_size", "strides", "padding", "input_dilation", "kernel_dilation", "feature_group_count")
    layer = layer_of(function, parameters, layer, arguments, "Conv")
    kernel, bias = _read(function, parameters, layer)
    check_arrays(function, kernel, bias, layer.feature_group_count, transposed=False)
    n = kernel.ndim - 2
    dilation = repeat(function, "kernel_dilation", layer.kernel_dilation, n)
    if set(repeat(function, "input_dilation", layer.input_dilation, n)) != {1}:
        raise ValueError(f"{function}: layer must have input_dilation=1, got {layer.input_dilation}")
    return ConvWeights(
        kernel,
        bias,
        strides=repeat(function, "strides", layer.strides, n),
        padding=_padding(function, layer.padding, kernel, dilation),
        dilation=dilation,
        groups=layer.feature_group_count,
        channels_last=True,
    )


def _read(function: str, parameters: Any, layer: Any) -> tuple[jax.Array, jax.Array | None]:
    """`(kernel, bias)`, after a check that the window of the kernel is that of the layer."""
    kernel = read_parameter(function, parameters, "kernel")
    assert kernel is not None
    size = (layer.kernel_size,) if isinstance(layer.kernel_size, int) else tuple(layer.kernel_size)
    if kernel.shape[:-2] != size:
        raise ValueError(
            f"{function}: the parameters must have a kernel with the kernel_size of the layer, {size}, "
            f"got a kernel of {kernel.shape}"
        )
    return kernel, read_parameter(function, parameters, "bias", optional=True)


def _padding(function: str, padding: Any, kernel: jax.Array, dilation: tuple[int, ...]) -> Padding:
    n = kernel.ndim - 2
    if padding == "CAUSAL" and n == 1:
        return causal_padding(kernel, dilation)
    if isinstance(padding, str):
        if padding not in _PADDINGS:
            raise ValueError(f"{function}: layer must have padding with zeros, got {padding!r}")
        return padding
    return padding_pairs(function, padding, n)


def write_conv(weights: ConvWeights) -> dict[str, jax.Array]:
    """Returns the parameters of a `Conv` of linen or nnx, "kernel" and "bias".

    A layer of nnx loads them by `nnx.update(layer, parameters)`.

    Raises:
      TypeError: weights are not `ConvWeights`.
    """
    check_record(f"{_MODULE}.write_conv", weights, ConvWeights)
    return _parameters(weights.kernel, weights.bias)


def read_conv_transpose(parameters: Any, layer: Any = None) -> ConvTransposeWeights:
    """Reads a `ConvTranspose` of linen or nnx. The arguments and the errors are those of `read_conv`."""
    function = f"{_MODULE}.read_conv_transpose"
    arguments = ("kernel_size", "strides", "padding", "kernel_dilation", "transpose_kernel")
    layer = layer_of(function, parameters, layer, arguments, "ConvTranspose")
    kernel, bias = _read(function, parameters, layer)
    if not layer.transpose_kernel:
        kernel = swap_groups(reverse_window(kernel), 1)
    check_arrays(function, kernel, bias, 1, transposed=True)
    n = kernel.ndim - 2
    dilation = repeat(function, "kernel_dilation", layer.kernel_dilation, n)
    strides = repeat(function, "strides", layer.strides, n)
    padding: Any = layer.padding
    if isinstance(padding, str):
        if padding not in ("SAME", "VALID"):
            raise ValueError(f"{function}: layer must have padding with zeros, got {padding!r}")
        extents = window_extents(kernel, dilation)
        padding = [transpose_padding(k, s, padding) for k, s in zip(extents, strides, strict=True)]
    return ConvTransposeWeights(
        kernel,
        bias,
        strides=strides,
        padding=dilated_padding(kernel, dilation, padding_pairs(function, padding, n)),
        output_padding=(0,) * n,
        dilation=dilation,
        groups=1,
        channels_last=True,
    )


def write_conv_transpose(weights: ConvTransposeWeights, *, transpose_kernel: bool = False) -> dict[str, jax.Array]:
    """Returns the parameters of a `ConvTranspose` of linen or nnx, "kernel" and "bias".

    Args:
      weights: the record.
      transpose_kernel: the argument of the layer.

    Raises:
      TypeError: weights are not `ConvTransposeWeights`.
      ValueError: weights have groups, which the layer does not have.
    """
    function = f"{_MODULE}.write_conv_transpose"
    check_record(function, weights, ConvTransposeWeights)
    if weights.groups != 1:
        raise ValueError(f"{function}: weights must have groups=1, as ConvTranspose of flax, got {weights.groups}")
    kernel = weights.kernel
    return _parameters(kernel if transpose_kernel else reverse_window(swap_groups(kernel, 1)), weights.bias)


def _parameters(kernel: jax.Array, bias: jax.Array | None) -> dict[str, jax.Array]:
    return {"kernel": kernel} if bias is None else {"kernel": kernel, "bias": bias}
