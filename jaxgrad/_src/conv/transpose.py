"""The public op `jaxgrad.conv_transpose`: the input gradient of a convolution, not a convolution of a dilated input."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax import lax

from jaxgrad._src.choice.op import Op
from jaxgrad._src.conv.api import convolve
from jaxgrad._src.conv.backends import BACKENDS
from jaxgrad._src.conv.call.geometry import dilated_size, swap_features, transpose_padding
from jaxgrad._src.conv.on_xla.forms import remark_on_xla
from jaxgrad._src.conv.read.convolution import LaxArguments
from jaxgrad._src.core import checks
from jaxgrad._src.core.activations import Activation
from jaxgrad._src.core.precision import precision_of_call

_NAME = "jaxgrad.conv_transpose"
OP = Op("conv_transpose", ("input_gradient", "forward", "weight_gradient"), BACKENDS, remark_on_xla)
_DEFAULT_LAYOUTS = {2: "NC IO", 3: "NHC HIO", 4: "NHWC HWIO", 5: "NHWDC HWDIO"}


@OP.public
def conv_transpose(
    lhs: jax.typing.ArrayLike,
    rhs: jax.typing.ArrayLike,
    strides: Sequence[int],
    padding: str | Sequence[tuple[int, int]],
    rhs_dilation: Sequence[int] | None = None,
    dimension_numbers: Any = None,
    transpose_kernel: bool = False,
    precision: Any = None,
    preferred_element_type: Any = None,
    use_consistent_padding: bool = False,
    *,
    bias: jax.typing.ArrayLike | None = None,
    activation: Activation = None,
    feature_group_count: int = 1,
    output_padding: int | Sequence[int] = 0,
    implementation: str | None = None,
) -> jax.Array:
    """Transposed convolution, with the arguments of `jax.lax.conv_transpose`, groups, a bias and fast gradients.

    Args:
      lhs: a rank n+2 array, the input, for n spatial dimensions.
      rhs: a rank n+2 array, the kernel weights. With G groups, lhs has G*I features and the result has G*O: rhs has I
        input and G*O output features. With `transpose_kernel`, rhs has the layout of the weights of the convolution
        that is transposed: G*I on its output feature axis and O on its input feature axis.
      strides: a sequence of n ints, the factors by which the spatial sizes grow.
      padding: the string "SAME" or "VALID" ("SAME_LOWER" too if all strides are 1), or a sequence of n pairs
        `(low, high)` of ints. A string is the padding of the convolution that is transposed. Pairs pad the dilated
        input, unless `use_consistent_padding` is set.
      rhs_dilation: None, or a sequence of n ints, the dilation of the window.
      dimension_numbers: as in `jax.lax.conv_transpose`. None means channels last: NHWC, HWIO, NHWC for two spatial
        dimensions.
      transpose_kernel: whether to reverse the window and swap the feature axes of rhs, which makes the result the
        input gradient of a convolution with rhs.
      precision: as in `jaxgrad.conv_general_dilated`.
      preferred_element_type: as in `jax.lax.conv_general_dilated`.
      use_consistent_padding: whether pairs are the padding of the convolution that is transposed, as strings are.
      bias: None, or an array of shape [output features] with the dtype of the result, added to the result.
      activation: "relu", "silu" or "gelu", or the function of `jax.nn`, applied after the bias, or None, as in
        `jaxgrad.conv_general_dilated`. XLA applies it.
      feature_group_count: the number of groups of input features.
      output_padding: an int or a sequence of n ints, the positions added at the high end of each spatial dimension of
        the result, each less than the larger of the stride and the dilation. It selects among the input sizes for which
        the transposed convolution has the same output size, as in PyTorch and ONNX.
      implementation: as in `jaxgrad.conv_general_dilated`.

    Returns:
      The result. Shape and dtype are those of `jax.lax.conv_transpose`, where it supports the arguments.

    Raises:
      TypeError: an error of `jax.lax.conv_general_dilated`; transpose_kernel or use_consistent_padding is not a bool;
        strides, rhs_dilation, padding, output_padding or feature_group_count is not made of ints; bias has another
        dtype than the result; or activation as in `jaxgrad.conv_general_dilated`.
      ValueError: an error of `jax.lax.conv_general_dilated`; the ranks of lhs and rhs differ; strides, rhs_dilation,
        padding, output_padding, feature_group_count, bias, activation or implementation is not one of the values above;
        dimension_numbers is None for more than three spatial dimensions; or an error of a forced implementation as in
        `jaxgrad.conv_general_dilated`.
      RuntimeError: the library of the forced implementation is not installed.

    Examples:
      >>> x, w = jnp.ones((8, 16, 16, 32)), jnp.ones((4, 4, 32, 16))
      >>> jaxgrad.conv_transpose(x, w, (2, 2), "SAME").shape
      (8, 32, 32, 16)
    """
    lhs, rhs = checks.as_array(_NAME, "lhs", lhs), checks.as_array(_NAME, "rhs", rhs)
    transpose_kernel = checks.check_flag(_NAME, "transpose_kernel", transpose_kernel)
    use_consistent_padding = checks.check_flag(_NAME, "use_consistent_padding", use_consistent_padding)
    feature_group_count = checks.as_int(_NAME, "feature_group_count", feature_group_count)
    if lhs.ndim != rhs.ndim or lhs.ndim < 2:
        raise ValueError(f"{_NAME}: lhs and rhs must have the same rank of at least 2, got {lhs.shape} and {rhs.shape}")
    n = lhs.ndim - 2
    if dimension_numbers is None:
        if lhs.ndim not in _DEFAULT_LAYOUTS:
            raise ValueError(f"{_NAME}: dimension_numbers must be given for {n} spatial dimensions")
        layout, window_layout = _DEFAULT_LAYOUTS[lhs.ndim].split()
        dimension_numbers = (layout, window_layout, layout)
    try:
        dn = lax.conv_dimension_numbers(lhs.shape, rhs.shape, dimension_numbers)
    except (TypeError, ValueError) as error:
        raise checks.named_error(_NAME, error) from error
    _check_groups(feature_group_count, rhs.shape[dn.rhs_spec[0]])
    strides = _sizes("strides", strides, n)
    dilation = _sizes("rhs_dilation", (1,) * n if rhs_dilation is None else rhs_dilation, n)
    extents = [dilated_size(rhs.shape[axis], d) for axis, d in zip(dn.rhs_spec[2:], dilation, strict=True)]
    is_plain = max(strides, default=1) == 1
    if is_plain and isinstance(padding, str) and padding == "SAME_LOWER":  # as in jax.lax
        padding = lax.padtype_to_pads([lhs.shape[axis] for axis in dn.lhs_spec[2:]], extents, strides, padding)
    pads = _padding(padding, use_consistent_padding, extents, strides)
    added = _output_padding(output_padding, strides, dilation)
    if transpose_kernel and feature_group_count > 1:
        rhs = swap_features(rhs, dn.rhs_spec, feature_group_count)
    elif transpose_kernel:
        out, inn, *window = dn.rhs_spec
        dn = dn._replace(rhs_spec=(inn, out, *window))
    arguments = LaxArguments(
        window_strides=(1,) * n,
        padding=[(low, high + more) for (low, high), more in zip(pads, added, strict=True)],
        lhs_dilation=strides,
        rhs_dilation=dilation,
        dimension_numbers=dn,
        feature_group_count=feature_group_count,
        precision=precision_of_call(precision),
        preferred_element_type=preferred_element_type,
        window_reversed=transpose_kernel,
    )
    return convolve(OP, arguments, lhs, rhs, bias, activation, implementation)


def _check_groups(feature_group_count: int, output_features: int) -> None:
    if feature_group_count < 1 or output_features % feature_group_count:
        raise ValueError(
            f"{_NAME}: feature_group_count must be positive and divide the output axis of rhs, {output_features}, "
            f"got {feature_group_count}"
        )


def _sizes(name: str, value: Sequence[int], n: int) -> tuple[int, ...]:
    sizes = checks.as_ints(_NAME, name, value)
    if len(sizes) != n or any(size < 1 for size in sizes):
        raise ValueError(
            f"{_NAME}: {name} must be {n} positive integers, one for each spatial dimension, got {tuple(value)}"
        )
    return sizes


def _padding(
    padding: str | Sequence[tuple[int, int]], consistent: bool, extents: Sequence[int], strides: Sequence[int]
) -> list[tuple[int, int]]:
    """Returns the padding of the dilated input."""
    n = len(strides)
    if isinstance(padding, str):
        if padding not in ("SAME", "VALID"):
            raise ValueError(f"{_NAME}: padding must be 'SAME', 'VALID' or {n} pairs, got {padding!r}")
        return [transpose_padding(k, s, padding) for k, s in zip(extents, strides, strict=True)]
    if not isinstance(padding, (Sequence, np.ndarray)) or getattr(padding, "ndim", 1) == 0:
        raise TypeError(f"{_NAME}: padding must be 'SAME', 'VALID' or {n} pairs, got {type(padding).__name__}")
    pairs = [checks.as_ints(_NAME, "padding", pair) for pair in padding]
    if len(pairs) != n or any(len(pair) != 2 for pair in pairs):
        raise ValueError(
            f"{_NAME}: padding must have {n} pairs (low, high), one for each spatial dimension, got {padding!r}"
        )
    return [
        transpose_padding(k, s, (low, high)) if consistent else (low, high)
        for k, s, (low, high) in zip(extents, strides, pairs, strict=True)
    ]


def _output_padding(value: int | Sequence[int], strides: Sequence[int], dilation: Sequence[int]) -> tuple[int, ...]:
    n = len(strides)
    values = (value,) * n if isinstance(value, (int, np.integer)) else value
    sizes = checks.as_ints(_NAME, "output_padding", values)
    if len(sizes) != n:
        raise ValueError(f"{_NAME}: output_padding must be an integer or {n} integers, got {value!r}")
    for size, stride, d in zip(sizes, strides, dilation, strict=True):
        if not 0 <= size < max(stride, d):
            raise ValueError(
                f"{_NAME}: output_padding must lie in [0, max(stride, dilation)) = [0, {max(stride, d)}), got {size}"
            )
    return sizes
