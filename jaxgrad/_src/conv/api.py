"""The public op `jaxgrad.conv_general_dilated`.

The path of a call: `convolve` below reads the call as one of the three passes (`read.op_call`), selects backends for
each pass (`choice.selection`) and calls the differentiable pass (`autodiff`). `passes` batches and partitions it, and a
backend of `conv/kernels` or `conv/on_xla/xla.py` runs it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from jaxgrad._src.choice.candidates import XLA
from jaxgrad._src.choice.op import Op, Rejection
from jaxgrad._src.choice.selection import Selection, select
from jaxgrad._src.choice.settings import of_kernels
from jaxgrad._src.conv.activations import ACTIVATIONS, activate, check_activation
from jaxgrad._src.conv.backend import PASSES
from jaxgrad._src.conv.backends import BACKENDS
from jaxgrad._src.conv.call.params import ConvParams
from jaxgrad._src.conv.on_xla.forms import remark_on_xla
from jaxgrad._src.conv.on_xla.xla import add_bias_and_relu
from jaxgrad._src.conv.read.convolution import LaxArguments
from jaxgrad._src.conv.read.op_call import OpCall, read
from jaxgrad._src.core import checks, marks
from jaxgrad._src.core.activations import Activation, activation_name
from jaxgrad._src.core.precision import precision_of_call
from jaxgrad._src.native import cuda
from jaxgrad._src.run.mesh_axes import explicit_mesh, pvary_to_match

OP = Op("conv_general_dilated", PASSES, BACKENDS, remark_on_xla)
_NAME = "jaxgrad.conv_general_dilated"
_PADDINGS = "SAME", "SAME_LOWER", "VALID"


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
    out_sharding: NamedSharding | PartitionSpec | None = None,
    *,
    bias: jax.typing.ArrayLike | None = None,
    activation: Activation = None,
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
      out_sharding: None, or the sharding of the result over the explicit axes of a mesh, as in
        `jax.lax.conv_general_dilated`: a `jax.sharding.PartitionSpec` for the mesh of `jax.set_mesh`, or a
        `jax.sharding.NamedSharding`. A gradient has the sharding of its operand.
      bias: None, or an array of shape [output features] with the dtype of the result, added to the result.
      activation: "relu", "silu" or "gelu", applied after the bias, or None. The functions `jax.nn.relu`, `jax.nn.silu`
        and `jax.nn.gelu` stand for their names. "gelu" is the approximation by tanh, the default of `jax.nn.gelu`. The
        gradient of relu at zero is zero, as in `jax.nn.relu`. XLA applies silu and gelu.
      implementation: None selects the fastest implementation known for each pass: the value, the input gradient and the
        weight gradient. "xla", "onednn", "cudnn", "cpu" or "cuda" forces one; "cpu" and "cuda" are jaxgrad's own
        kernels, for depthwise convolutions. `jaxgrad.explain` reports what None selects, and why.

    Returns:
      An array with the shape and dtype of the result of `jax.lax.conv_general_dilated`.

    Raises:
      TypeError: an error of `jax.lax.conv_general_dilated`; bias has another dtype than the result; or activation is
        "silu" or "gelu" and the result is not of a floating-point type.
      ValueError: an error of `jax.lax.conv_general_dilated`; bias has another shape than [output features]; activation
        or implementation is unknown; the forced implementation does not support the call, or the program is lowered for
        another platform than that of the forced implementation.
      RuntimeError: the library of the forced implementation is not installed.

    Supported by the kernels: 1 to 3 spatial dimensions in any layout, strides, groups, window dilation, asymmetric and
    negative padding, and input dilation where the window strides are 1; float32, bfloat16 and float16, and on a GPU
    float64. oneDNN computes float16 in float32. Other calls run on XLA. `jaxgrad.config` sets how cuDNN's kernels are
    chosen.

    Reverse-mode differentiation works to any order on the same kernels, and so does forward mode inside
    `jaxgrad.forward_mode`. relu saves its result for the backward pass, silu and gelu save their argument. cuDNN fuses
    convolution, bias and relu where it has a kernel for it.

    Under `jit` over a mesh, each device computes its shard of the batch and, without groups, of the input or output
    features. The weight gradient is summed over a split batch, the result over split input features. Operands that are
    split in other ways are gathered first. Independent problems of `jax.vmap` are split as a batch is.

    Examples:
      >>> x, w = jnp.ones((8, 32, 32, 3)), jnp.ones((3, 3, 3, 16))
      >>> layout = ("NHWC", "HWIO", "NHWC")
      >>> y = jaxgrad.conv_general_dilated(x, w, (2, 2), "SAME", dimension_numbers=layout)
      >>> y.shape
      (8, 16, 16, 16)
    """
    if isinstance(padding, str) and padding.upper() not in _PADDINGS:
        raise ValueError(
            f"{_NAME}: padding must be {', '.join(map(repr, _PADDINGS))} or pairs of ints, got {padding!r}"
        )
    if not isinstance(padding, str):
        _check_sizes_of_padding(padding)
    strides = checks.as_ints(_NAME, "window_strides", window_strides)
    if min(strides, default=1) < 1:  # jax.lax finds them only when it lowers the program
        raise ValueError(f"{_NAME}: window_strides must be positive integers, got {strides}")
    if not isinstance(out_sharding, NamedSharding | PartitionSpec | None):
        raise TypeError(
            f"{_NAME}: out_sharding must be a NamedSharding, a PartitionSpec or None, got {type(out_sharding).__name__}"
        )
    arguments = LaxArguments(
        window_strides=strides,
        padding=padding,
        lhs_dilation=_dilation("lhs_dilation", lhs_dilation, len(strides)),
        rhs_dilation=_dilation("rhs_dilation", rhs_dilation, len(strides)),
        dimension_numbers=dimension_numbers,
        feature_group_count=checks.as_int(_NAME, "feature_group_count", feature_group_count),
        batch_group_count=checks.as_int(_NAME, "batch_group_count", batch_group_count),
        precision=precision_of_call(precision),
        preferred_element_type=preferred_element_type,
    )
    return convolve(OP, arguments, lhs, rhs, bias, activation, implementation, out_sharding)


def _check_sizes_of_padding(padding: Any) -> None:
    """jax.lax checks the types and the number of pairs, but adds sizes of 63 bits that overflow."""
    for size in jax.tree.leaves(padding):
        if checks.is_key(size):
            raise TypeError(f"{_NAME}: padding must be a string or pairs of ints, got {type(size).__name__}")
        if isinstance(size, (int, np.integer)) and abs(int(size)) >= 1 << 62:
            raise ValueError(f"{_NAME}: each size of padding must fit into 63 bits, got {size}")


def _dilation(name: str, values: Any, count: int) -> tuple[int, ...] | None:
    if values is None:
        return None
    found = checks.as_ints(_NAME, name, values)
    if len(found) != count:
        raise ValueError(f"{_NAME}: {name} must have as many elements as window_strides, {count}, got {found}")
    return found


@marks.exempt()  # inside `jaxgrad.accelerate`, the selection of this call stands
def convolve(
    op: Op,
    arguments: LaxArguments,
    lhs: Any,
    rhs: Any,
    bias: Any,
    activation: Activation,
    implementation: str | None,
    out_sharding: Any = None,
) -> jax.Array:
    """The common path of both convolution ops; `op` is the public op that was called."""
    name = f"jaxgrad.{op.name}"
    activation = activation_name(name, activation, ACTIVATIONS)
    op.check_implementation(implementation)
    lhs, rhs = checks.as_array(name, "lhs", lhs), checks.as_array(name, "rhs", rhs)
    if lhs.ndim < 2 or rhs.ndim < 2:
        raise ValueError(f"{name}: lhs and rhs must have a rank of at least 2, got {lhs.shape} and {rhs.shape}")
    relu = activation == "relu"
    try:
        call = read(arguments, lhs, rhs, bias is not None)
        reason = call.why_on_xla
    except (TypeError, ValueError, AttributeError, OverflowError) as error:
        raise checks.named_error(name, error) from error
    bias = _check_bias(name, bias, call)
    check_activation(name, activation, call.result.dtype)
    if reason:
        selection = select(op, implementation, rejection=Rejection(reason))
    else:
        lhs, rhs = (a if a.dtype == call.result.dtype else a.astype(call.result.dtype) for a in (lhs, rhs))
        known = call.static_rejections if implementation is None else None  # a forced backend must have a plan
        selection = select(op, implementation, call.conv_call(relu), known=known)
    explicit = out_sharding is not None or explicit_mesh(lhs, rhs) is not None
    if reason or (not explicit and _can_bypass_custom_vjp(selection, call)):
        rhs = lax.rev(rhs, call.dimension_numbers.rhs_spec[2:]) if arguments.window_reversed else rhs
        call_lax = arguments.call_lax_on_padded if call.is_or_derives_miscompiled else arguments.call_lax
        y = call_lax(lhs, rhs, out_sharding)
        return activate(add_bias_and_relu(y, bias, relu, call.dimension_numbers.out_spec), activation)
    sharding = arguments.explicit_sharding(lhs, rhs, out_sharding)
    pass_call = call.pass_call
    params = ConvParams(pass_call.geometry, arguments.precision, tuple(selection.candidates.items()), of_kernels())
    lhs, rhs, bias = pvary_to_match(lhs, rhs, bias)
    y = pass_call.run(params, lhs, rhs, bias, relu)
    return activate(y if sharding is None else jax.sharding.reshard(y, sharding), activation)


def _can_bypass_custom_vjp(selection: Selection, call: OpCall) -> bool:
    """Whether `jax.lax.conv_general_dilated` with JAX's derivatives is right, and as fast as the passes on XLA.

    It is not for groups, matrix products and weight gradients of transposed convolutions, which on_xla/xla.py writes in
    another way, nor on a GPU, where the passes have faster batching rules. Nor is it used over explicit mesh axes,
    because XLA's partitioner computes some weight gradients incorrectly where an axis splits a spatial dimension
    (jaxlib 0.10.2 to 0.12.0.1: twice their value).
    """
    may_run_on_gpu_kernels = selection.implementation != "xla" and not cuda.unavailable()
    pass_call = call.pass_call
    geometry = pass_call.geometry
    return (
        pass_call.pass_name == "forward"
        and not call.is_or_derives_miscompiled
        and not may_run_on_gpu_kernels
        and all(candidates == XLA for candidates in selection.candidates.values())
        and geometry.feature_group_count == 1
        and not (geometry.is_matrix_product or geometry.has_disjoint_windows)
    )


def _check_bias(name: str, bias: Any, call: OpCall) -> jax.Array | None:
    if bias is None:
        return None
    bias, result = checks.as_array(name, "bias", bias), call.result
    features = result.shape[call.dimension_numbers.out_spec[1]]
    checks.check_shape(name, "bias", bias, ("output features",), (features,))
    if bias.dtype != result.dtype:
        raise TypeError(f"{name}: bias must have the dtype of the result, {result.dtype.name}, got {bias.dtype.name}")
    return bias
