"""Depthwise convolutions on jaxgrad's own CPU kernels, ffi/cpu/depthwise: the calls of its handlers.

The kernels compute all passes in float32, whatever the dtype of the arrays, and add in an order that does not depend on
the number of threads. The channels or the last spatial axis must be the last axis of x and of y.
"""

from __future__ import annotations

import jax

from jaxgrad._src.conv.backend import PASSES
from jaxgrad._src.conv.cpu_handlers import call_handler
from jaxgrad._src.conv.geometry import maybe_reverse_window
from jaxgrad._src.conv.params import ConvParams
from jaxgrad._src.conv.problem import (
    ConvProblem,
    forward_problem,
    input_gradient_problem,
    weight_gradient_problem,
)
from jaxgrad._src.core.jax_internals import cleared_lru_cache
from jaxgrad._src.native import cpu
from jaxgrad._src.native.ffi import empty_if_none

_DTYPES = ("float32", "bfloat16", "float16")


def supports(problem: ConvProblem) -> bool:
    """Whether the kernels compute the passes of a problem."""
    g = problem.geometry
    depthwise = problem.is_depthwise and g.feature_group_count > 1 and problem.dtype.name in _DTYPES
    return depthwise and all(len(spec) - 1 in (spec[1], spec[-1]) for spec in (g.lhs_spec, g.out_spec))


def forward(params: ConvParams, relu: bool, x: jax.Array, w: jax.Array, bias: jax.Array | None) -> jax.Array:
    """Returns y = conv(x, w) + bias, or the relu of it."""
    g = params.geometry
    operands = (x, maybe_reverse_window(g, w), empty_if_none(bias, x.dtype))
    (y,) = _call("forward", forward_problem(g, x, w), operands, bias is not None, relu=relu)
    return y


def input_gradient(params: ConvParams, dy: jax.Array, w: jax.Array) -> jax.Array:
    """Returns dx."""
    g = params.geometry
    (dx,) = _call("input_gradient", input_gradient_problem(g, dy, w), (dy, maybe_reverse_window(g, w)), False)
    return dx


def weight_gradient(
    params: ConvParams, needs_bias_gradient: bool, x: jax.Array, dy: jax.Array
) -> tuple[jax.Array, jax.Array | None]:
    """Returns dw and, if needed, the bias gradient."""
    g = params.geometry
    dw, db = _call("weight_gradient", weight_gradient_problem(g, x, dy), (x, dy), needs_bias_gradient)
    return maybe_reverse_window(g, dw), db if needs_bias_gradient else None


def _call(
    pass_name: str, problem: ConvProblem, operands: tuple[jax.Array, ...], has_bias: bool, **attributes: bool
) -> tuple[jax.Array, ...]:
    target = f"jaxgrad_cpu_depthwise_{pass_name}"
    return call_handler(target, pass_name, problem, operands, has_bias, _workspace(pass_name, problem), **attributes)


@cleared_lru_cache(4096)
def _workspace(pass_name: str, problem: ConvProblem) -> int:
    """The bytes of workspace of a call, for the threads of this machine."""
    shapes = [(*problem.num_problems, *shape) for shape in problem.shapes]
    return int(cpu.module.depthwise_workspace(PASSES.index(pass_name), shapes, problem.geometry.attributes()))
