"""The public op `jaxgrad.conv_general_dilated`.

The path of a call: `convolve` reads the call as one of the three passes (`canonicalize`), selects backends for each
pass (`core.selection`) and calls the differentiable pass (`autodiff`). `passes` batches and partitions it, and a
backend (`onednn`, `cudnn`, `depthwise_cuda`) or `xla` runs it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from jaxgrad._src.conv.backend import PASSES
from jaxgrad._src.conv.backends import BACKENDS
from jaxgrad._src.conv.canonicalize import LaxArguments
from jaxgrad._src.conv.convolve import convolve
from jaxgrad._src.core.op import Op

OP = Op("conv_general_dilated", PASSES, BACKENDS)


@OP.public
def conv_general_dilated(
    lhs: jax.typing.ArrayLike,
    rhs: jax.typing.ArrayLike,
    window_strides: Sequence[int],
    padding: str | Sequence[tuple[int, int]],
    lhs_dilation: Sequence[int] | None = None,
    rhs_dilation: Sequence[int] | None = None,
    dimension_numbers: Any = None,
    feature_group_count: int = 1,
    batch_group_count: int = 1,
    precision: Any = None,
    preferred_element_type: Any = None,
    *,
    bias: jax.typing.ArrayLike | None = None,
    activation: str | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """General n-dimensional convolution, with the arguments of `jax.lax.conv_general_dilated` and fast gradients.

    Args:
      lhs: a rank n+2 array, the input, for n spatial dimensions.
      rhs: a rank n+2 array, the kernel weights.
      window_strides: a sequence of n ints, the strides of the window.
      padding: the string "SAME", "SAME_LOWER" or "VALID", or a sequence of n pairs `(low, high)` of ints, which may be
        negative.
      lhs_dilation: None, or a sequence of n ints, the dilation of the input (also known as transposed convolution).
      rhs_dilation: None, or a sequence of n ints, the dilation of the window (also known as atrous convolution).
      dimension_numbers: None (NCHW, OIHW, NCHW), a tuple of three strings such as ("NHWC", "HWIO", "NHWC"), or
        `jax.lax.ConvDimensionNumbers`.
      feature_group_count: the number of groups of input features.
      batch_group_count: the number of groups of the batch.
      precision: as in `jax.lax.conv_general_dilated`. On a GPU float32 operands are rounded to TF32, unless the
        precision is `jax.lax.Precision.HIGHEST`.
      preferred_element_type: as in `jax.lax.conv_general_dilated`.
      bias: None, or an array of shape [output features] with the dtype of the result, added to the result.
      activation: "relu", applied after the bias, or None. The gradient of relu at zero is zero, as in `jax.nn.relu`.
      implementation: None selects the fastest implementation known for each pass: the value, the input gradient and the
        weight gradient. "xla", "cpu" (oneDNN), "cudnn" or "cuda" (jaxgrad's CUDA kernel for depthwise weight gradients,
        with XLA for the other passes) forces one. `jaxgrad.explain` reports what None selects, and why.

    Returns:
      An array with the shape and dtype of the result of `jax.lax.conv_general_dilated`.

    Raises:
      TypeError: an error of `jax.lax.conv_general_dilated`, or bias has another dtype than the result.
      ValueError: an error of `jax.lax.conv_general_dilated`; bias has another shape than [output features]; activation
        or implementation is unknown; the forced implementation does not support the call, or the program is lowered for
        another platform than that of the forced implementation.
      RuntimeError: the library of the forced implementation is not installed.

    Supported by the kernels: 1 to 3 spatial dimensions in any layout, strides, groups, window dilation, asymmetric and
    negative padding, and input dilation where the window strides are 1; float32, bfloat16 and float16, and on a GPU
    float64. oneDNN computes float16 in float32. Other calls run on XLA. `jaxgrad.config` sets how cuDNN's kernels are
    chosen.

    Reverse-mode differentiation works to any order on the same kernels, and so does forward mode inside
    `jaxgrad.forward_mode`. With an activation, the residual is the result and not the argument of the activation.
    cuDNN fuses convolution, bias and relu where it has a kernel for it.

    Under `jit` over a mesh, each device computes its shard of the batch and, without groups, of the input or output
    features. The weight gradient is summed over a split batch, the result over split input features. Operands that are
    split in other ways are gathered first. Independent problems of `jax.vmap` are split as a batch is.

    Example:
      >>> x, w = jnp.ones((8, 32, 32, 3)), jnp.ones((3, 3, 3, 16))
      >>> layout = ("NHWC", "HWIO", "NHWC")
      >>> y = jaxgrad.conv_general_dilated(x, w, (2, 2), "SAME", dimension_numbers=layout)
      >>> y.shape
      (8, 16, 16, 16)
    """
    arguments = LaxArguments(
        window_strides=tuple(window_strides),
        padding=padding,
        lhs_dilation=None if lhs_dilation is None else tuple(lhs_dilation),
        rhs_dilation=None if rhs_dilation is None else tuple(rhs_dilation),
        dimension_numbers=dimension_numbers,
        feature_group_count=feature_group_count,
        batch_group_count=batch_group_count,
        precision=precision,
        preferred_element_type=preferred_element_type,
    )
    return convolve(OP, arguments, lhs, rhs, bias, activation, implementation)
