"""The weight gradient of depthwise convolutions on jaxgrad's own CUDA kernel, ffi/cuda/depthwise.

NVRTC, which comes with JAX's CUDA packages, compiles the kernel while a gradient that needs it is lowered. The kernel
sums in float32, always in the same order, without TF32. It takes channels-last operands, and weights whose output
features are the first or the last axis. XLA transposes other layouts before and after the call.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from jaxgrad._src.conv.backend import ConvBackend, named_arrays
from jaxgrad._src.conv.geometry import change_layout, maybe_reverse_window
from jaxgrad._src.conv.params import ConvCall, ConvParams
from jaxgrad._src.conv.problem import ConvProblem, weight_gradient_problem
from jaxgrad._src.conv.xla import bias_gradient
from jaxgrad._src.core.jax_internals import cleared_lru_cache
from jaxgrad._src.core.op import Rejection
from jaxgrad._src.native import cuda
from jaxgrad._src.native.ffi import ffi_call

_NOT_DEPTHWISE = Rejection("jaxgrad's own kernel is for depthwise convolutions")


class DepthwiseCudaBackend(ConvBackend):
    """jaxgrad's CUDA kernel for depthwise weight gradients."""

    implementation = "cuda"
    platform = "cuda"
    title = "CUDA kernels of jaxgrad"
    description = "jaxgrad's own kernel"
    passes = ("weight_gradient",)
    instead = "cuDNN or XLA"
    preferred_to = ("cudnn", "xla")

    def supports(self, pass_name: str, call: ConvCall) -> Rejection | None:
        # A missing library is reported here and not by `unavailable`: most convolutions have no use for the kernel.
        if not call.problem.is_depthwise:
            return _NOT_DEPTHWISE
        return None if cuda.targets() else _missing(cuda.unavailable())

    def find_plan(self, pass_name: str, call: ConvCall) -> Rejection | None:
        """Raises RuntimeError for a failure of CUDA in a multi-process program, as the backend of cuDNN does."""
        try:
            if reason := kernel_rejection(call.problem):
                return Rejection(reason)
            reason = cuda.nvrtc_unavailable()
        except RuntimeError as error:
            if jax.process_count() > 1:
                raise
            reason = str(error)
        return _missing(reason) if reason else None

    def supports_resized(self, pass_name: str, call: ConvCall) -> bool:
        return not kernel_rejection(call.problem.in_groups())

    def typical_rejection(self, op_name: str, pass_name: str) -> Rejection | None:
        return _NOT_DEPTHWISE

    def weight_gradient(
        self, params: ConvParams, needs_bias_gradient: bool, x: jax.Array, dy: jax.Array
    ) -> tuple[jax.Array, jax.Array | None]:
        dw = _weight_gradient(params, x, dy)
        return dw, bias_gradient(params.geometry, dy) if needs_bias_gradient else None


def _missing(reason: str) -> Rejection:
    return Rejection(f"jaxgrad's own CUDA kernels are missing: {reason}", missing=reason)


@cleared_lru_cache(4096)
def kernel_rejection(problem: ConvProblem) -> str:
    """Returns why the kernel cannot compute a weight gradient; empty if it can."""
    device = cuda.gpu_ordinal()
    if device is None:
        return "jaxgrad's own kernel is compiled for the GPU of the machine that lowers the program, which has none"
    return str(cuda.module.depthwise_weight_gradient_rejection(*_arguments(device, _kernel_layout(problem))))


@cleared_lru_cache(4096)
def _workspace(problem: ConvProblem) -> int:
    """The bytes of workspace of a call in the kernel's layout.

    This compiles the kernel for the first GPU that JAX uses. The size depends only on the kind of that GPU, so that
    every host lowers the same program.
    """
    return int(cuda.module.depthwise_weight_gradient_plan(*_arguments(cuda.gpu_ordinal(), problem)))


def _arguments(device: int | None, problem: ConvProblem) -> tuple[Any, ...]:
    return device, cuda.float_type(problem.dtype), problem.shapes, problem.geometry.attributes()


def _kernel_layout(problem: ConvProblem) -> ConvProblem:
    """The problem in the layout that the kernel takes: the caller's layout of the weights where possible."""
    g = problem.geometry
    n = len(g.w_spatial)
    last = (0, n + 1, *range(1, n + 1))
    out, _, *window = g.rhs_spec
    as_given = window == sorted(window) and (out < window[0] or out > window[-1])
    weights = g.rhs_spec if as_given else tuple(range(n + 2))
    return problem.with_geometry(dataclasses.replace(g, lhs_spec=last, rhs_spec=weights, out_spec=last))


def _weight_gradient(params: ConvParams, x: jax.Array, dy: jax.Array) -> jax.Array:
    geometry = params.geometry
    problem = weight_gradient_problem(geometry, x, dy)
    if reason := kernel_rejection(problem):  # only a forced call that vmap has changed
        raise NotImplementedError(f"{reason}: {geometry} under vmap; implementation='xla' runs it")
    taken = _kernel_layout(problem)
    g = taken.geometry
    arrays = change_layout(x, geometry.lhs_spec, g.lhs_spec), change_layout(dy, geometry.out_spec, g.out_spec)
    result = jax.ShapeDtypeStruct(taken.w_shape, x.dtype)
    (dw,) = ffi_call(
        "jaxgrad_cuda_depthwise_weight_gradient",
        [result],
        arrays,
        _workspace(taken),
        named=named_arrays("weight_gradient", *arrays, result),
        **g.attributes(),
    )
    return maybe_reverse_window(geometry, change_layout(dw, g.rhs_spec, geometry.rhs_spec))
