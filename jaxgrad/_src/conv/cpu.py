"""The convolution passes on CPUs: oneDNN, or jaxgrad's own kernels where these are faster."""

from __future__ import annotations

import jax

from jaxgrad._src.conv import depthwise_cpu
from jaxgrad._src.conv.onednn import OneDnnBackend
from jaxgrad._src.conv.params import ConvCall, ConvParams
from jaxgrad._src.conv.problem import ConvProblem, forward_problem, input_gradient_problem, weight_gradient_problem
from jaxgrad._src.core.op import Rejection
from jaxgrad._src.native import cpu
from jaxgrad._src.selection.depthwise_kernels import prefers_own_kernel


class CpuBackend(OneDnnBackend):
    """jaxgrad's kernels and oneDNN, under one name: users select CPU kernels, whichever compute the call."""

    def unavailable(self) -> str:
        return cpu.unavailable()

    def supports(self, pass_name: str, call: ConvCall) -> Rejection | None:
        # A missing oneDNN is reported here and not by `unavailable`: depthwise convolutions have no use for it.
        if _runs_own_kernel(pass_name, call.problem):
            return None
        return _missing_onednn() or super().supports(pass_name, call)

    def find_plan(self, pass_name: str, call: ConvCall) -> Rejection | None:
        return None if _runs_own_kernel(pass_name, call.problem) else super().find_plan(pass_name, call)

    def remark(self, pass_name: str, call: ConvCall) -> str:
        return "" if _runs_own_kernel(pass_name, call.problem) else super().remark(pass_name, call)

    def describe(self, pass_name: str, call: ConvCall | None) -> str:
        own = call is not None and _runs_own_kernel(pass_name, call.problem)
        return "jaxgrad's own kernel" if own else super().describe(pass_name, call)

    def typical_rejection(self, op_name: str, pass_name: str) -> Rejection | None:
        return _missing_onednn()

    def forward(self, params: ConvParams, relu: bool, x: jax.Array, w: jax.Array, bias: jax.Array | None) -> jax.Array:
        if _runs_own_kernel("forward", forward_problem(params.geometry, x, w)):
            return depthwise_cpu.forward(params, relu, x, w, bias)
        return super().forward(params, relu, x, w, bias)

    def input_gradient(self, params: ConvParams, dy: jax.Array, w: jax.Array) -> jax.Array:
        if _runs_own_kernel("input_gradient", input_gradient_problem(params.geometry, dy, w)):
            return depthwise_cpu.input_gradient(params, dy, w)
        return super().input_gradient(params, dy, w)

    def weight_gradient(
        self, params: ConvParams, needs_bias_gradient: bool, x: jax.Array, dy: jax.Array
    ) -> tuple[jax.Array, jax.Array | None]:
        if _runs_own_kernel("weight_gradient", weight_gradient_problem(params.geometry, x, dy)):
            return depthwise_cpu.weight_gradient(params, needs_bias_gradient, x, dy)
        return super().weight_gradient(params, needs_bias_gradient, x, dy)


def _runs_own_kernel(pass_name: str, problem: ConvProblem) -> bool:
    """Whether jaxgrad's kernel runs a pass of a problem, and not oneDNN."""
    g = problem.geometry
    return depthwise_cpu.supports(problem) and (
        bool(cpu.onednn_unavailable())
        or prefers_own_kernel(pass_name, g.w_spatial, g.window_strides, g.rhs_dilation, g.lhs_spec[1] == 1)
    )


def _missing_onednn() -> Rejection | None:
    problem = cpu.onednn_unavailable()
    return Rejection(f"the kernels of oneDNN are missing: {problem}", missing=problem) if problem else None
