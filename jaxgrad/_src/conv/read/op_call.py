"""Reads a call of an op as one of the convolution passes.

A convolution without input dilation is a forward pass. A convolution with input dilation and unit window strides is the
input gradient of another convolution. All others run on XLA.
"""

from __future__ import annotations

import dataclasses
import itertools
from functools import cached_property

import jax

from jaxgrad._src.choice.op import Rejection
from jaxgrad._src.choice.selection import taken
from jaxgrad._src.choice.settings import of_kernels
from jaxgrad._src.conv.backend import PASSES
from jaxgrad._src.conv.backends import BACKENDS
from jaxgrad._src.conv.call.params import ConvCall
from jaxgrad._src.conv.call.problem import ConvProblem
from jaxgrad._src.conv.read.convolution import CROPPED, LaxArguments, LaxConvolution
from jaxgrad._src.conv.read.pass_calls import ForwardCall, InputGradientCall, forward_call, input_gradient_call
from jaxgrad._src.core.jax_internals import cleared_lru_cache

_MAX_CALLS = 4096  # kept, with different shapes and arguments


@dataclasses.dataclass(frozen=True)
class OpCall(LaxConvolution):
    """A call of an op, read by its shapes, dtypes and arguments alone."""

    has_bias: bool = False

    @cached_property
    def why_on_xla(self) -> str:
        """Why no pass computes the call; empty if a pass does."""
        if self.unsupported:
            return self.unsupported
        arguments = self.arguments
        lhs_dilation, rhs_dilation = arguments.lhs_dilation or (1,), arguments.rhs_dilation or (1,)
        if arguments.batch_group_count > 1:
            return "batch_group_count above 1 runs on XLA"
        if max(lhs_dilation) > 1 and max(arguments.window_strides) > 1:
            return "lhs_dilation and window_strides both above 1 run on XLA"
        if min(*arguments.window_strides, *lhs_dilation, *rhs_dilation) < 1:
            return "a stride or dilation below 1 runs on XLA, which refuses it"
        return "" if min(self.pass_call.geometry.x_spatial) > 0 else CROPPED

    @cached_property
    def pass_call(self) -> ForwardCall | InputGradientCall:
        """The pass that computes the call, where `why_on_xla` is empty."""
        a = self.normalized
        if a.is_input_dilated or (max(a.lhs_spatial) == 1 and not a.is_strided):
            call = input_gradient_call(a)
            # A single position that the padding surrounds: its input gradient is a matrix product.
            if a.is_input_dilated or call.geometry.is_matrix_product:
                return call
        return forward_call(a)

    @cached_property
    def _problem(self) -> ConvProblem:
        return self.pass_call.problem(self.result.dtype)

    def conv_call(self, relu: bool = False) -> ConvCall:
        """The call as the backends are asked about it."""
        transposed = self.pass_call.pass_name != "forward"
        return ConvCall(self._problem, self.arguments.precision, of_kernels(), self.has_bias, relu, transposed)

    @cached_property
    def static_rejections(self) -> dict[tuple[str, str], Rejection | None]:
        """The rejections by backends that depend on the problem alone, by implementation and pass."""
        call = self.conv_call()
        found: dict[tuple[str, str], Rejection | None] = {}
        for backend, name in itertools.product(BACKENDS, PASSES):
            if backend.depends_on_problem_only:
                rejection = taken(BACKENDS, backend, name, found) or backend.reject(name, call, forced=False)
                found[backend.implementation, name] = rejection
        return found


def read(arguments: LaxArguments, lhs: jax.Array, rhs: jax.Array, has_bias: bool) -> OpCall:
    """Reads a call; raises what `jax.lax.conv_general_dilated` raises.

    Calls are kept: outside `jax.jit`, reading a small call takes longer than running it.
    """
    shapes = lhs.shape, lhs.dtype, rhs.shape, rhs.dtype
    x64 = jax.config.jax_enable_x64  # type: ignore[attr-defined]  # limits preferred_element_type
    try:
        hash(arguments)
    except TypeError:  # for instance a padding that is a NumPy array
        return _read.__wrapped__(arguments, *shapes, has_bias, x64)  # type: ignore[attr-defined]
    return _read(arguments, *shapes, has_bias, x64)


@cleared_lru_cache(_MAX_CALLS)
def _read(arguments, lhs_shape, lhs_dtype, rhs_shape, rhs_dtype, has_bias, x64):
    lhs, rhs = jax.ShapeDtypeStruct(lhs_shape, lhs_dtype), jax.ShapeDtypeStruct(rhs_shape, rhs_dtype)
    result = jax.eval_shape(arguments.call_lax, lhs, rhs)  # checks the call as jax.lax does
    call = OpCall(arguments, lhs, rhs, result, has_bias)
    window = [rhs_shape[axis] for axis in call.dimension_numbers.rhs_spec[2:]]
    rates = arguments.rhs_dilation or (1,) * len(window)
    extents = [(size - 1) * rate + 1 for size, rate in zip(window, rates, strict=True)]
    if any(isinstance(size, int) and size >= 1 << 63 for size in extents):
        raise OverflowError(f"the dilated window has the sizes {extents}")
    if any(isinstance(size, int) and size >= 1 << 62 for size in result.shape):
        raise OverflowError(f"the result has the shape {result.shape}")
    return call
