"""Depthwise convolutions on jaxgrad's CPU kernels, ffi/cpu/depthwise: the calls of its handlers.

The kernels compute all passes in float32, whatever the dtype of the arrays, and add in an order that does not depend on
the number of threads. The channels or the last spatial axis must be the last axis of x and of y.
"""

from __future__ import annotations

import jax

from jaxgrad._src.choice.op import Rejection
from jaxgrad._src.conv.backend import PASSES
from jaxgrad._src.conv.call.params import ConvCall
from jaxgrad._src.conv.call.problem import ConvProblem
from jaxgrad._src.conv.kernels.cpu_handlers import HandlerBackend, call_handler
from jaxgrad._src.core.jax_internals import cleared_lru_cache
from jaxgrad._src.native import cpu

_DTYPES = ("float32", "bfloat16", "float16")


_NOT_DEPTHWISE = Rejection(
    "jaxgrad's own kernels take depthwise convolutions with the features or a spatial axis as the last axis"
)


class DepthwiseCpuBackend(HandlerBackend):
    """jaxgrad's CPU kernels."""

    implementation = "cpu"
    title = "CPU kernels of jaxgrad"
    description = "jaxgrad's own kernel"

    def unavailable(self) -> str:
        return cpu.unavailable()

    def supports(self, pass_name: str, call: ConvCall) -> Rejection | None:
        p, g = call.problem, call.problem.geometry
        depthwise = p.is_depthwise and g.feature_group_count > 1 and p.dtype.name in _DTYPES
        takes_layout = all(len(spec) - 1 in (spec[1], spec[-1]) for spec in (g.lhs_spec, g.out_spec))
        return None if depthwise and takes_layout else _NOT_DEPTHWISE

    def typical_rejection(self, op_name: str, pass_name: str) -> Rejection | None:
        return _NOT_DEPTHWISE

    def call(
        self,
        pass_name: str,
        problem: ConvProblem,
        operands: tuple[jax.Array, ...],
        has_bias: bool,
        relu: bool = False,
    ) -> tuple[jax.Array, ...]:
        target, workspace = f"jaxgrad_cpu_depthwise_{pass_name}", _workspace(pass_name, problem)
        attributes = {"relu": relu} if pass_name == "forward" else {}
        return call_handler(target, pass_name, problem, operands, has_bias, workspace, **attributes)


@cleared_lru_cache(4096)
def _workspace(pass_name: str, problem: ConvProblem) -> int:
    """The bytes of workspace of a call, for the threads of this machine."""
    shapes = [(*problem.num_problems, *shape) for shape in problem.shapes]
    return int(cpu.module.depthwise_workspace(PASSES.index(pass_name), shapes, problem.geometry.attributes()))
