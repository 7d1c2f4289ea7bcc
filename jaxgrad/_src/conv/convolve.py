"""The common path of both convolution ops: read the call, select the backends, run the pass."""

from __future__ import annotations

from typing import Any

import jax
from jax import lax

from jaxgrad._src.conv.canonicalize import LaxArguments, Reading, read
from jaxgrad._src.conv.params import ConvCall, ConvParams
from jaxgrad._src.conv.xla import add_bias_and_relu
from jaxgrad._src.core import checks
from jaxgrad._src.core.mesh_axes import pvary_to_match
from jaxgrad._src.core.op import Op, Rejection
from jaxgrad._src.core.selection import XLA, Selection, select
from jaxgrad._src.core.settings import current
from jaxgrad._src.native import cuda


def convolve(
    op: Op, arguments: LaxArguments, lhs: Any, rhs: Any, bias: Any, activation: str | None, implementation: str | None
) -> jax.Array:
    """Returns the convolution of lhs and rhs, with the bias and activation; `op` is the public op that was called."""
    name = f"jaxgrad.{op.name}"
    checks.check_choice(name, "activation", activation, (None, "relu"))
    op.check_implementation(implementation)
    lhs, rhs = checks.as_array(name, "lhs", lhs), checks.as_array(name, "rhs", rhs)
    has_bias, relu = bias is not None, activation == "relu"
    reading = read(arguments, lhs, rhs, has_bias)
    bias = _check_bias(name, bias, reading)
    pass_call = reading.pass_call
    if pass_call is None:
        selection = select(op, implementation, rejection=Rejection(reading.reason))
    else:
        lhs, rhs = (a if a.dtype == reading.result.dtype else a.astype(reading.result.dtype) for a in (lhs, rhs))
        call = ConvCall(
            pass_call.problem(lhs, rhs), arguments.precision, current(), has_bias, relu, pass_call.transposed
        )
        selection = select(op, implementation, call, known=reading.static_rejections)
    if pass_call is None or _can_bypass_custom_vjp(selection, reading):
        rhs = lax.rev(rhs, reading.dimension_numbers.rhs_spec[2:]) if arguments.window_reversed else rhs
        y = arguments.call_lax(lhs, rhs)
        return add_bias_and_relu(y, bias, relu, reading.dimension_numbers.out_spec)
    params = ConvParams(pass_call.geometry, arguments.precision, tuple(selection.candidates.items()), current())
    lhs, rhs, bias = pvary_to_match(lhs, rhs, bias)
    return pass_call.run(params, lhs, rhs, bias, relu)


def _can_bypass_custom_vjp(selection: Selection, reading: Reading) -> bool:
    """Whether `jax.lax.conv_general_dilated` with JAX's own derivatives is as fast as the passes on XLA.

    It is not for groups and matrix products, which conv/xla.py writes in another way, nor on a GPU, where the passes
    have faster batching rules.
    """
    may_run_on_gpu_kernels = selection.implementation != "xla" and not cuda.unavailable()
    geometry = reading.pass_call.geometry if reading.pass_call else None
    return (
        geometry is not None
        and not may_run_on_gpu_kernels
        and all(candidates == XLA for candidates in selection.candidates.values())
        and geometry.feature_group_count == 1
        and not geometry.is_matrix_product
    )


def _check_bias(name: str, bias: Any, reading: Reading) -> jax.Array | None:
    if bias is None:
        return None
    bias, result = checks.as_array(name, "bias", bias), reading.result
    features = result.shape[reading.dimension_numbers.out_spec[1]]
    checks.check_shape(name, "bias", bias, ("output features",), (features,))
    if bias.dtype != result.dtype:
        raise TypeError(f"{name}: bias must have the dtype of the result, {result.dtype.name}, got {bias.dtype.name}")
    return bias
