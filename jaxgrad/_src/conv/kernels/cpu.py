"""The convolution passes on CPUs: oneDNN, or jaxgrad's kernels where these are faster."""

from __future__ import annotations

import dataclasses

import jax

from jaxgrad._src.choice.op import Rejection
from jaxgrad._src.choice.table import Row, preference, this_device
from jaxgrad._src.conv.backend import ConvBackend
from jaxgrad._src.conv.call.features import ConvFeatures
from jaxgrad._src.conv.call.params import ConvCall, ConvParams
from jaxgrad._src.conv.call.problem import ConvProblem, forward_problem, input_gradient_problem, weight_gradient_problem
from jaxgrad._src.conv.kernels import depthwise_cpu
from jaxgrad._src.conv.kernels.depthwise_cpu import DepthwiseCpuBackend
from jaxgrad._src.conv.kernels.onednn import OneDnnBackend, missing_onednn, plan_cache_info
from jaxgrad._src.core.jax_internals import cleared_lru_cache
from jaxgrad._src.native import cpu


class CpuBackend(ConvBackend):
    """The faster of oneDNN and jaxgrad's kernels, by the table of preferences, under one name."""

    implementation = "cpu"
    platform = "cpu"
    title = "CPU kernels"
    description = "oneDNN"
    takes_independent_problems = True
    depends_on_problem_only = True

    def unavailable(self) -> str:
        return cpu.unavailable()

    def supports(self, pass_name: str, call: ConvCall) -> Rejection | None:
        return _faster(pass_name, call.problem).supports(pass_name, call)

    def find_plan(self, pass_name: str, call: ConvCall) -> Rejection | None:
        return _faster(pass_name, call.problem).find_plan(pass_name, call)

    def remark(self, pass_name: str, call: ConvCall) -> str:
        return _faster(pass_name, call.problem).remark(pass_name, call)

    def describe(self, pass_name: str, call: ConvCall | None) -> str:
        return self.description if call is None else _faster(pass_name, call.problem).describe(pass_name, call)

    def table_row(self, pass_name: str, call: ConvCall) -> str:
        rows = [super().table_row(pass_name, call)]
        if depthwise_cpu.supports(call.problem) and not cpu.onednn_unavailable():
            rows.append(str(_row_of_libraries(this_device("cpu"), pass_name, call.problem)))
        return "; ".join(rows)

    def typical_rejection(self, op_name: str, pass_name: str) -> Rejection | None:
        return missing_onednn()

    def plan_cache_info(self) -> dict[str, int]:
        return plan_cache_info()

    def forward(self, params: ConvParams, relu: bool, x: jax.Array, w: jax.Array, bias: jax.Array | None) -> jax.Array:
        backend = _faster("forward", forward_problem(params.geometry, x, w))
        return backend.forward(params, relu, x, w, bias)

    def input_gradient(self, params: ConvParams, dy: jax.Array, w: jax.Array) -> jax.Array:
        backend = _faster("input_gradient", input_gradient_problem(params.geometry, dy, w))
        return backend.input_gradient(params, dy, w)

    def weight_gradient(
        self, params: ConvParams, needs_bias_gradient: bool, x: jax.Array, dy: jax.Array
    ) -> tuple[jax.Array, jax.Array | None]:
        backend = _faster("weight_gradient", weight_gradient_problem(params.geometry, x, dy))
        return backend.weight_gradient(params, needs_bias_gradient, x, dy)


CPU = CpuBackend()


class _OneOfBoth(ConvBackend):
    """One of the two alone: for calls that force it, and for tunings."""

    def unavailable(self) -> str:
        return ""  # `supports` reports it, so that the warning names the kernels once, under "cpu"

    def supports(self, pass_name: str, call: ConvCall) -> Rejection | None:
        return self._missing() or super().supports(pass_name, call)

    def _missing(self) -> Rejection | None:
        problem = CPU.unavailable()
        return Rejection(f"the {self.title} are missing: {problem}", missing=problem) if problem else None

    def reject(self, pass_name: str, call: ConvCall, *, forced: bool) -> Rejection | None:
        return super().reject(pass_name, call, forced=True) if forced else _RUNS_AS_CPU

    def typical_rejection(self, op_name: str, pass_name: str) -> Rejection | None:
        return self._missing() or dataclasses.replace(_RUNS_AS_CPU, slower=True)  # a call that forces it runs on it

    def why_slower(self, pass_name: str, call: ConvCall, *, resized: bool = False) -> str:
        return CPU.why_slower(pass_name, call, resized=resized)

    def table_row(self, pass_name: str, call: ConvCall) -> str:
        return ""  # no table prefers it: a call or a tuning names it

    def repeats_another(self, pass_name: str, call: ConvCall) -> bool:
        return _faster(pass_name, call.problem) is self


class _OneDnn(_OneOfBoth, OneDnnBackend):
    def _missing(self) -> Rejection | None:
        return super()._missing() or missing_onednn()


class _OwnKernels(_OneOfBoth, DepthwiseCpuBackend):
    pass


_RUNS_AS_CPU = Rejection("the faster of oneDNN and jaxgrad's own kernels runs under the name 'cpu'")
ONEDNN, OWN_KERNELS = _OneDnn(), _OwnKernels()


def runs_own_kernel(pass_name: str, problem: ConvProblem) -> bool:
    """Whether jaxgrad's kernel runs a pass of a problem under the name "cpu", and not oneDNN."""
    return depthwise_cpu.supports(problem) and (
        bool(cpu.onednn_unavailable()) or prefers_own_kernel(pass_name, problem)
    )


def prefers_own_kernel(pass_name: str, problem: ConvProblem) -> bool:
    """Whether jaxgrad's kernel is the faster one, as measured."""
    return _row_of_libraries(this_device("cpu"), pass_name, problem).prefer == OWN_KERNELS.implementation


@cleared_lru_cache(4096)
def _row_of_libraries(_: str, pass_name: str, problem: ConvProblem) -> Row:
    """The row that chooses between the two. Kept, also by the device."""
    names = OWN_KERNELS.implementation, ONEDNN.implementation
    row = preference("conv", pass_name, "cpu", ConvFeatures(problem, "cpu"), names)
    assert row is not None
    return row


def _faster(pass_name: str, problem: ConvProblem) -> ConvBackend:
    return OWN_KERNELS if runs_own_kernel(pass_name, problem) else ONEDNN
