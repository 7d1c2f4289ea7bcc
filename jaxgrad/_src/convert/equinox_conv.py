"""Convolutions of equinox: `eqx.nn.Conv` and `eqx.nn.ConvTranspose`, and their subclasses."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax

from jaxgrad._src.convert.arrays import as_jax
from jaxgrad._src.convert.conv_weights import (
    ConvTransposeWeights,
    ConvWeights,
    check_arrays,
    features_first,
    features_last,
    reverse_window,
    swap_groups,
)
from jaxgrad._src.convert.records import check_record

_MODULE = "jaxgrad.convert.equinox"


def read_conv(layer: eqx.nn.Conv) -> ConvWeights:
    """Reads a `Conv`, `Conv1d`, `Conv2d` or `Conv3d` of equinox.

    Raises:
      TypeError: layer is not an `eqx.nn.Conv`.
      ValueError: the padding is not with zeros, or there are more than 3 spatial dimensions.
    """
    function = f"{_MODULE}.read_conv"
    weight, bias = _read(function, layer, eqx.nn.Conv)
    kernel = features_last(weight)
    check_arrays(function, kernel, bias, layer.groups, transposed=False)
    return ConvWeights(
        kernel,
        bias,
        strides=layer.stride,
        padding=layer.padding,
        dilation=layer.dilation,
        groups=layer.groups,
        channels_last=False,
    )


def write_conv(weights: ConvWeights, layer: eqx.nn.Conv) -> eqx.nn.Conv:
    """Returns a layer of equinox with the arrays of the record.

    Args:
      weights: the record.
      layer: a layer with the same arguments; only its arrays are replaced.

    Raises:
      TypeError: weights are not `ConvWeights`, or layer is not an `eqx.nn.Conv`.
      ValueError: the layer computes something else than the record.
    """
    function = f"{_MODULE}.write_conv"
    check_record(function, weights, ConvWeights)
    _check_same(function, weights, read_conv(layer))
    return _write(layer, features_first(weights.kernel), weights.bias)


def read_conv_transpose(layer: eqx.nn.ConvTranspose) -> ConvTransposeWeights:
    """Reads a `ConvTranspose`, `ConvTranspose1d`, `ConvTranspose2d` or `ConvTranspose3d` of equinox.

    Raises:
      TypeError: layer is not an `eqx.nn.ConvTranspose`.
      ValueError: the padding is not with zeros, or there are more than 3 spatial dimensions.
    """
    function = f"{_MODULE}.read_conv_transpose"
    weight, bias = _read(function, layer, eqx.nn.ConvTranspose)
    kernel = swap_groups(reverse_window(features_last(weight)), layer.groups)
    check_arrays(function, kernel, bias, layer.groups, transposed=True)
    output_padding = layer.output_padding
    if isinstance(layer.padding, str):
        padding, output_padding = _pairs(layer, kernel), (0,) * layer.num_spatial_dims
    else:
        padding = tuple((int(low), int(high)) for low, high in layer.padding)
    return ConvTransposeWeights(
        kernel,
        bias,
        strides=layer.stride,
        padding=padding,
        output_padding=output_padding,
        dilation=layer.dilation,
        groups=layer.groups,
        channels_last=False,
    )


def _pairs(layer: eqx.nn.ConvTranspose, kernel: jax.Array) -> tuple[tuple[int, int], ...]:
    """The padding that the layer makes of a string."""
    pairs = []
    for size, s, a, d in zip(layer.kernel_size, layer.stride, layer.output_padding, layer.dilation, strict=True):
        if layer.padding == "VALID":
            pairs.append((0, -a))
            continue
        total = d * (size - 1) - s + a + 1
        low = (max(total, 0) + (layer.padding == "SAME_LOWER")) // 2
        pairs.append((low, total - low))
    return tuple(pairs)


def write_conv_transpose(weights: ConvTransposeWeights, layer: eqx.nn.ConvTranspose) -> eqx.nn.ConvTranspose:
    """Returns a layer of equinox with the arrays of the record.

    Args:
      weights: the record.
      layer: a layer with the same arguments; only its arrays are replaced.

    Raises:
      TypeError: weights are not `ConvTransposeWeights`, or layer is not an `eqx.nn.ConvTranspose`.
      ValueError: the layer computes something else than the record.
    """
    function = f"{_MODULE}.write_conv_transpose"
    check_record(function, weights, ConvTransposeWeights)
    _check_same(function, weights, read_conv_transpose(layer))
    return _write(layer, features_first(reverse_window(swap_groups(weights.kernel, weights.groups))), weights.bias)


def _read(function: str, layer: Any, kind: Any) -> tuple[jax.Array, jax.Array | None]:
    if not isinstance(layer, kind):
        raise TypeError(f"{function}: layer must be an equinox.nn.{kind.__name__}, got {type(layer).__name__}")
    if layer.padding_mode != "ZEROS":
        raise ValueError(f"{function}: layer must have padding_mode='ZEROS', got {layer.padding_mode!r}")
    bias = None if layer.bias is None else as_jax(function, "bias", layer.bias).reshape(-1)
    return as_jax(function, "weight", layer.weight), bias


def _write(layer: Any, weight: jax.Array, bias: jax.Array | None) -> Any:
    layer = eqx.tree_at(lambda layer: layer.weight, layer, weight)
    return layer if bias is None else eqx.tree_at(lambda layer: layer.bias, layer, bias.reshape(layer.bias.shape))


def _check_same(function: str, weights: Any, layer: Any) -> None:
    def described(record: Any) -> dict[str, Any]:
        arrays = {
            name: None if a is None else a.shape for name, a in (("kernel", record.kernel), ("bias", record.bias))
        }
        padding = record.padding
        if isinstance(record, ConvTransposeWeights):
            padding = tuple((a, b - o) for (a, b), o in zip(padding, record.output_padding, strict=True))
        return {
            **arrays,
            "strides": record.strides,
            "padding": padding,
            "dilation": record.dilation,
            "groups": record.groups,
        }

    own, other = described(weights), described(layer)
    for name, value in other.items():
        if own[name] != value:
            raise ValueError(f"{function}: weights must have {name} = {value} of the layer, got {own[name]}")
