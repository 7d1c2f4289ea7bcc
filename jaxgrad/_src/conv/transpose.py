"""Transposed convolution: the triangle's input gradient as an op of its own, not a convolution over stuffed zeros."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax import lax

from jaxgrad import _checks, _conv_cuda, _conv_cudnn
from jaxgrad._conv_geometry import dilated_size, transpose_padding
from jaxgrad._dispatch import Op
from jaxgrad.conv import KERNELS, convolve, swap_features

_OP = "jaxgrad.conv_transpose"
_DISPATCH = Op(
    "conv_transpose",
    KERNELS,
    ("backward_input", "forward", "backward_filter"),
    {**_conv_cuda.USUAL, **_conv_cudnn.USUAL_TRANSPOSED},
)
_DEFAULT_LAYOUTS = {2: "NC IO", 3: "NHC HIO", 4: "NHWC HWIO", 5: "NHWDC HWDIO"}


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
    activation: str | None = None,
    feature_group_count: int = 1,
    output_padding: int | Sequence[int] = 0,
    implementation: str | None = None,
) -> jax.Array:
    """`jax.lax.conv_transpose`, argument for argument, with groups, output padding, a bias and fast gradients.

    Args:
      lhs: the input, of rank n + 2 for n spatial axes.
      rhs: the window's weights, of rank n + 2. With G groups, lhs has G I features and the result G O: rhs has I input
        and G O output features or, with `transpose_kernel`, the other way round, G I on its output axis and O on its
        input axis, as the weights of the convolution that is transposed.
      strides: n factors by which the input is spread.
      padding: "SAME", "VALID", or n pairs (low, high). Strings, and with `use_consistent_padding` pairs too, are
        those of the convolution that is transposed; pairs otherwise pad the spread input.
      rhs_dilation: n factors by which the window is spread, or None for ones.
      dimension_numbers: as in `jax.lax.conv_transpose`; None is channels last: NHWC, HWIO, NHWC for two spatial axes.
      transpose_kernel: reverses the window and swaps the feature axes of rhs, which makes this the gradient of a
        convolution with rhs.
      precision, preferred_element_type: as in `jax.lax`.
      use_consistent_padding: see `padding`.
      bias: [output features], added to the result and of its dtype, or None.
      activation: "relu" of that, or None for none: as in `jaxgrad.conv_general_dilated`. It is XLA's.
      feature_group_count: the number of groups that the features fall into.
      output_padding: rows added at the high end of each spatial axis of the result, an integer or n of them, each below
        its stride or its dilation: which of the inputs of a strided convolution with the same output is meant.
      implementation: as in `jaxgrad.conv_general_dilated`.

    Returns:
      The result, with the shape and dtype of `jax.lax.conv_transpose`'s where that has the arguments.

    Raises:
      TypeError, ValueError: what `jax.lax.conv_general_dilated` raises; padding, output_padding, bias, activation
        or implementation out of what is said above; or a forced implementation, as for `conv_general_dilated`.
      RuntimeError: a forced implementation whose library or compiled module cannot be loaded.

    Example:
      >>> x, w = jnp.ones((8, 16, 16, 32)), jnp.ones((4, 4, 32, 16))
      >>> jaxgrad.conv_transpose(x, w, (2, 2), "SAME").shape
      (8, 32, 32, 16)
    """
    lhs, rhs = _checks.as_array(_OP, "lhs", lhs), _checks.as_array(_OP, "rhs", rhs)
    transpose_kernel = _checks.check_flag(_OP, "transpose_kernel", transpose_kernel)
    if lhs.ndim != rhs.ndim or lhs.ndim < 2:
        raise ValueError(f"{_OP}: lhs and rhs must have the same rank of at least 2, got {lhs.shape} and {rhs.shape}")
    n = lhs.ndim - 2
    if dimension_numbers is None:
        if lhs.ndim not in _DEFAULT_LAYOUTS:
            raise ValueError(f"{_OP}: dimension_numbers must be given for {n} spatial axes")
        layout, window_layout = _DEFAULT_LAYOUTS[lhs.ndim].split()
        dimension_numbers = (layout, window_layout, layout)
    dn = lax.conv_dimension_numbers(lhs.shape, rhs.shape, dimension_numbers)
    _check_groups(feature_group_count, rhs.shape[dn.rhs_spec[0]])
    strides = _sizes("strides", strides, n)
    dilation = _sizes("rhs_dilation", (1,) * n if rhs_dilation is None else rhs_dilation, n)
    extents = [dilated_size(rhs.shape[axis], d) for axis, d in zip(dn.rhs_spec[2:], dilation, strict=True)]
    if padding == "SAME_LOWER" and max(strides, default=1) == 1:  # a plain convolution, as in jax.lax
        padding = lax.padtype_to_pads([lhs.shape[axis] for axis in dn.lhs_spec[2:]], extents, strides, padding)
    pads = _padding(padding, use_consistent_padding, extents, strides)
    added = _output_padding(output_padding, strides, dilation)
    if transpose_kernel and feature_group_count > 1:
        rhs = swap_features(rhs, dn.rhs_spec, feature_group_count)
    elif transpose_kernel:
        out, inn, *window = dn.rhs_spec
        dn = dn._replace(rhs_spec=(inn, out, *window))
    settings = {
        "window_strides": (1,) * n,
        "padding": [(low, high + more) for (low, high), more in zip(pads, added, strict=True)],
        "lhs_dilation": strides,
        "rhs_dilation": dilation,
        "dimension_numbers": dn,
        "feature_group_count": feature_group_count,
        "batch_group_count": 1,
        "precision": precision,
        "preferred_element_type": preferred_element_type,
    }
    return convolve(_DISPATCH, lhs, rhs, bias, activation, implementation, settings, window_reversed=transpose_kernel)


def _check_groups(feature_group_count: int, output_features: int) -> None:
    if feature_group_count < 1 or output_features % feature_group_count:
        raise ValueError(
            f"{_OP}: feature_group_count must be positive and divide the output axis of rhs, {output_features}, "
            f"got {feature_group_count}"
        )


def _sizes(name: str, value: Sequence[int], n: int) -> tuple[int, ...]:
    sizes = tuple(int(v) for v in value)
    if len(sizes) != n or any(size < 1 for size in sizes):
        raise ValueError(f"{_OP}: {name} must be {n} positive integers, one to each spatial axis, got {tuple(value)}")
    return sizes


def _padding(
    padding: str | Sequence[tuple[int, int]], consistent: bool, extents: Sequence[int], strides: Sequence[int]
) -> list[tuple[int, int]]:
    """The padding of the spread input."""
    n = len(strides)
    if isinstance(padding, str):
        if padding not in ("SAME", "VALID"):
            raise ValueError(f"{_OP}: padding must be 'SAME', 'VALID' or {n} pairs, got {padding!r}")
        return [transpose_padding(k, s, padding) for k, s in zip(extents, strides, strict=True)]
    pairs = [(int(low), int(high)) for low, high in padding]
    if len(pairs) != n:
        raise ValueError(f"{_OP}: padding must have {n} pairs, one to each spatial axis, got {len(pairs)}")
    return [transpose_padding(k, s, p) if consistent else p for k, s, p in zip(extents, strides, pairs, strict=True)]


def _output_padding(value: int | Sequence[int], strides: Sequence[int], dilation: Sequence[int]) -> tuple[int, ...]:
    n = len(strides)
    sizes = (int(value),) * n if isinstance(value, int) else tuple(int(v) for v in value)
    if len(sizes) != n:
        raise ValueError(f"{_OP}: output_padding must be an integer or {n} integers, got {value!r}")
    for size, stride, d in zip(sizes, strides, dilation, strict=True):
        if not 0 <= size < max(stride, d):
            raise ValueError(
                f"{_OP}: output_padding must lie in [0, max(stride, dilation)) = [0, {max(stride, d)}), got {size}"
            )
    return sizes
