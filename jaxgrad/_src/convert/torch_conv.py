"""Convolutions of PyTorch: the state dicts of `torch.nn.Conv1d` to `Conv3d` and `ConvTranspose1d` to `3d`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax

from jaxgrad._src.convert.conv_weights import (
    ConvTransposeWeights,
    ConvWeights,
    check_arrays,
    features_first,
    features_last,
    padding_pairs,
    repeat,
)
from jaxgrad._src.convert.records import check_record
from jaxgrad._src.convert.torch_parameters import read_parameter

_MODULE = "jaxgrad.convert.torch"


def read_conv(
    state_dict: Mapping[str, Any],
    prefix: str = "",
    *,
    stride: int | Sequence[int] = 1,
    padding: str | int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
) -> ConvWeights:
    """Reads the state dict of a `torch.nn.Conv1d`, `Conv2d` or `Conv3d`.

    A state dict has no more than the weights. The other arguments are those of the module, with its defaults; the
    padding is with zeros.

    Args:
      state_dict: the state dict of the convolution or of a module that contains it; tensors or arrays.
      prefix: the path of the convolution within the module with a final dot, such as "encoder.conv1.".
      stride: the strides of the window, an int or one for each spatial dimension.
      padding: an int, one for each spatial dimension, "same" or "valid".
      dilation: the dilation of the window, as stride.
      groups: the number of groups.

    Raises:
      TypeError: state_dict is not a mapping, or a value is not a floating-point array.
      ValueError: there is no convolution with this prefix, or another argument does not fit it.
    """
    function = f"{_MODULE}.read_conv"
    kernel, bias = _read(function, state_dict, prefix)
    check_arrays(function, kernel, bias, groups, transposed=False)
    n = kernel.ndim - 2
    dilations, strides = repeat(function, "dilation", dilation, n), repeat(function, "stride", stride, n)
    if isinstance(padding, str) and padding == "same":
        totals = [(size - 1) * d for size, d in zip(kernel.shape[:n], dilations, strict=True)]
        padding = [(total // 2, total - total // 2) for total in totals]  # type: ignore[misc]
    elif isinstance(padding, str) and padding == "valid":
        padding = 0
    elif isinstance(padding, str):
        raise ValueError(f"{function}: padding must be 'same', 'valid', an int or {n} ints, got {padding!r}")
    pairs = padding_pairs(function, padding, n, least=0)
    return ConvWeights(
        kernel, bias, strides=strides, padding=pairs, dilation=dilations, groups=groups, channels_last=False
    )


def write_conv(weights: ConvWeights, prefix: str = "") -> dict[str, jax.Array]:
    """Returns the state dict of a `torch.nn.Conv1d`, `Conv2d` or `Conv3d`.

    Load it by `module.load_state_dict({key: torch.from_dlpack(array) for key, array in state_dict.items()})`.

    Args:
      weights: the record.
      prefix: put before each key, such as "encoder.conv1.".

    Raises:
      TypeError: weights are not `ConvWeights`.
    """
    check_record(f"{_MODULE}.write_conv", weights, ConvWeights)
    return _write(weights, prefix)


def read_conv_transpose(
    state_dict: Mapping[str, Any],
    prefix: str = "",
    *,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] = 0,
    output_padding: int | Sequence[int] = 0,
    groups: int = 1,
    dilation: int | Sequence[int] = 1,
) -> ConvTransposeWeights:
    """Reads the state dict of a `torch.nn.ConvTranspose1d`, `ConvTranspose2d` or `ConvTranspose3d`.

    The arguments and the errors are those of `read_conv`, and `output_padding`.
    """
    function = f"{_MODULE}.read_conv_transpose"
    kernel, bias = _read(function, state_dict, prefix)
    check_arrays(function, kernel, bias, groups, transposed=True)
    n = kernel.ndim - 2
    return ConvTransposeWeights(
        kernel,
        bias,
        strides=repeat(function, "stride", stride, n),
        padding=padding_pairs(function, padding, n, least=0),
        output_padding=repeat(function, "output_padding", output_padding, n, least=0),
        dilation=repeat(function, "dilation", dilation, n),
        groups=groups,
        channels_last=False,
    )


def write_conv_transpose(weights: ConvTransposeWeights, prefix: str = "") -> dict[str, jax.Array]:
    """Returns the state dict of a `torch.nn.ConvTranspose1d`, `ConvTranspose2d` or `ConvTranspose3d`.

    The arguments are those of `write_conv`.

    Raises:
      TypeError: weights are not `ConvTransposeWeights`.
    """
    check_record(f"{_MODULE}.write_conv_transpose", weights, ConvTransposeWeights)
    return _write(weights, prefix)


def _read(function: str, state_dict: Any, prefix: str) -> tuple[jax.Array, jax.Array | None]:
    weight = read_parameter(function, state_dict, prefix, "weight")
    bias = read_parameter(function, state_dict, prefix, "bias") if f"{prefix}bias" in state_dict else None
    if weight.ndim < 3:
        raise ValueError(
            f"{function}: {prefix}weight must have rank 3 or more, as that of a convolution, got {weight.shape}"
        )
    return features_last(weight), bias


def _write(weights: ConvWeights | ConvTransposeWeights, prefix: str) -> dict[str, jax.Array]:
    state_dict = {f"{prefix}weight": features_first(weights.kernel)}
    return state_dict if weights.bias is None else {**state_dict, f"{prefix}bias": weights.bias}
