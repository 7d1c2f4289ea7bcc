"""Depthwise convolutions on jaxgrad's CUDA kernels, ffi/cuda/depthwise.

NVRTC, which comes with JAX's CUDA packages, compiles a kernel while a program that needs it is lowered. The kernels
sum in float32, always in the same order, without TF32. They take channels-last operands, and weights whose output
features are the first or the last axis. XLA transposes other layouts before and after the call.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from jaxgrad._src.choice.op import Rejection
from jaxgrad._src.conv.backend import PASSES, ConvBackend, named_arrays
from jaxgrad._src.conv.call.geometry import change_layout, maybe_reverse_window
from jaxgrad._src.conv.call.params import ConvCall, ConvParams
from jaxgrad._src.conv.call.problem import (
    ConvProblem,
    forward_problem,
    input_gradient_problem,
    weight_gradient_problem,
)
from jaxgrad._src.conv.on_xla.xla import bias_gradient
from jaxgrad._src.core.jax_internals import cleared_lru_cache
from jaxgrad._src.native import cuda
from jaxgrad._src.native.ffi import empty_if_none, ffi_call
from jaxgrad._src.run.cuda_kernels import NO_GPU, CudaKernelBackend
from jaxgrad._src.run.plan_directory import plan_directory

_NOT_DEPTHWISE = Rejection("jaxgrad's own kernel is for depthwise convolutions with a channel multiplier of 1")


class DepthwiseCudaBackend(CudaKernelBackend, ConvBackend):
    """jaxgrad's CUDA kernels for depthwise convolutions."""

    instead = "cuDNN or XLA"

    def supports(self, pass_name: str, call: ConvCall) -> Rejection | None:
        return None if call.problem.is_depthwise else _NOT_DEPTHWISE

    def rejection_on_gpu(self, pass_name: str, call: ConvCall) -> str:
        return kernel_rejection(pass_name, call.problem)

    def remark(self, pass_name: str, call: ConvCall) -> str:
        if call.transposed:
            return "XLA applies relu" if call.relu and pass_name == "input_gradient" else ""
        if pass_name != "forward" or not (call.relu or call.has_bias):
            return ""
        if call.relu and call.has_bias:
            return "bias and relu are fused"
        return "relu is fused" if call.relu else "bias is fused"

    def typical_rejection(self, op_name: str, pass_name: str) -> Rejection | None:
        return _NOT_DEPTHWISE

    def forward(self, params: ConvParams, relu: bool, x: jax.Array, w: jax.Array, bias: jax.Array | None) -> jax.Array:
        problem = forward_problem(params.geometry, x, w)
        operands = {"x": x, "w": maybe_reverse_window(params.geometry, w)}
        return _call("forward", problem, operands, [empty_if_none(bias, x.dtype)], relu=relu)

    def input_gradient(self, params: ConvParams, dy: jax.Array, w: jax.Array) -> jax.Array:
        problem = input_gradient_problem(params.geometry, dy, w)
        return _call("input_gradient", problem, {"y": dy, "w": maybe_reverse_window(params.geometry, w)})

    def weight_gradient(
        self, params: ConvParams, needs_bias_gradient: bool, x: jax.Array, dy: jax.Array
    ) -> tuple[jax.Array, jax.Array | None]:
        g = params.geometry
        dw = _call("weight_gradient", weight_gradient_problem(g, x, dy), {"x": x, "y": dy})
        return maybe_reverse_window(g, dw), bias_gradient(g, dy) if needs_bias_gradient else None


@cleared_lru_cache(4096)
def kernel_rejection(pass_name: str, problem: ConvProblem) -> str:
    """Returns why the kernel cannot compute a pass; empty if it can."""
    device = cuda.gpu_ordinal()
    if device is None:
        return NO_GPU
    taken = _kernel_layout(problem)
    if pass_name == "weight_gradient":
        return str(cuda.module.depthwise_weight_gradient_rejection(*_arguments(device, taken)))
    which, *arguments = _arguments(device, taken)
    return str(cuda.module.depthwise_convolution_rejection(which, PASSES.index(pass_name), *arguments))


@cleared_lru_cache(4096)
@plan_directory()
def _compile(pass_name: str, problem: ConvProblem, relu: bool) -> int:
    """Compiles the kernel of a call for the first GPU that JAX uses, and returns the bytes of workspace.

    The bytes depend only on the kind of that GPU, so that every host lowers the same program.
    """
    device, *arguments = _arguments(cuda.gpu_ordinal(), problem)
    if pass_name == "weight_gradient":
        return int(cuda.module.depthwise_weight_gradient_plan(device, *arguments))
    dtype, *arguments = arguments
    cuda.module.prepare_depthwise_convolution(device, PASSES.index(pass_name), dtype, relu, *arguments)
    return 0


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


def _call(
    pass_name: str,
    problem: ConvProblem,
    operands: dict[str, jax.Array],
    more: list[jax.Array] | None = None,
    **own: Any,
) -> jax.Array:
    """Calls the handler of a pass.

    Args:
      pass_name: the pass.
      problem: the convolution.
      operands: two of "x", "w" and "y"; w in the order of `jax.lax`.
      more: operands after these.
      **own: attributes of the pass.

    Returns:
      The third of x, w and y, in the caller's layout.
    """
    if reason := kernel_rejection(pass_name, problem):  # only a forced call that vmap has changed
        raise NotImplementedError(f"{reason}: {problem.geometry} under vmap; implementation='xla' runs it")
    taken = _kernel_layout(problem)
    given = {"x": problem.geometry.lhs_spec, "w": problem.geometry.rhs_spec, "y": problem.geometry.out_spec}
    specs = {"x": taken.geometry.lhs_spec, "w": taken.geometry.rhs_spec, "y": taken.geometry.out_spec}
    arrays = {name: change_layout(array, given[name], specs[name]) for name, array in operands.items()}
    (name,) = set("xwy") - set(operands)
    result = jax.ShapeDtypeStruct(dict(zip("xwy", taken.shapes, strict=True))[name], problem.dtype)
    (found,) = ffi_call(
        f"jaxgrad_cuda_depthwise_{pass_name}",
        [result],
        [*arrays.values(), *(more or [])],
        _compile(pass_name, taken, own.get("relu", False)),
        named=named_arrays(pass_name, *arrays.values(), result),
        **taken.geometry.attributes(),
        **own,
    )
    return change_layout(found, specs[name], given[name])
