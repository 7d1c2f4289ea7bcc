"""Selects how an equation of pooling in `jax.lax` is computed, whoever has written it.

`jax.lax.reduce_window` with the maximum or the sum is one primitive, and the gradient of the maximum is another. The
gradient of a sum is again a sum of windows, of dy with zeros between its elements.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.extend.core import Primitive

from jaxgrad._src.choice.candidates import Candidates
from jaxgrad._src.choice.explain import explain_pass
from jaxgrad._src.choice.selection import select, supporting
from jaxgrad._src.core.checks import FLOATING
from jaxgrad._src.pool import passes
from jaxgrad._src.pool.api import AVG_POOL, MAX_POOL
from jaxgrad._src.pool.backends import BACKENDS
from jaxgrad._src.pool.params import PoolParams, PoolProblem, Window
from jaxgrad._src.run.equation_plan import EquationPlan, unless_refused

# The op and the pass of each primitive.
PRIMITIVES: dict[Primitive, tuple[Any, str]] = {
    lax.reduce_window_max_p: (MAX_POOL, "forward"),
    lax.reduce_window_sum_p: (AVG_POOL, "forward"),
    lax.select_and_scatter_add_p: (MAX_POOL, "input_gradient"),
}


@dataclasses.dataclass(frozen=True)
class PoolEquation:
    """An equation as a pass of pooling.

    Attributes:
      problem: the pass, of arrays that may have more axes of size 1 before those of the equation.
      operands: the places of the operands of the pass among those of the equation.
    """

    problem: PoolProblem
    operands: tuple[int, ...]


def read_equation(primitive: Primitive, parameters: Mapping[str, Any], avals: Sequence[Any]) -> PoolEquation | str:
    """Reads an equation; returns why no pass computes it if there is none.

    Args:
      primitive: one of `PRIMITIVES`.
      parameters: of the equation.
      avals: shapes and dtypes of its operands and its result.
    """
    is_gradient = primitive is lax.select_and_scatter_add_p
    x = avals[1] if is_gradient else avals[0]
    sizes, strides = parameters["window_dimensions"], parameters["window_strides"]
    padding, ones = parameters["padding"], (1,) * x.ndim
    dilation = parameters.get("window_dilation") or ones
    if not all(isinstance(size, int) for aval in avals for size in aval.shape):
        return "symbolic shapes run on XLA"
    if x.dtype.name not in FLOATING:
        return f"the pooling kernels take {', '.join(FLOATING)}, not {x.dtype.name}"
    if is_gradient and parameters["select_prim"] is not lax.ge_p:
        return "no kernel computes the gradient of a minimum"
    if tuple(parameters.get("base_dilation") or ones) != ones:
        return "no pooling kernel takes base dilation"
    if any(size < 0 for pair in padding for size in pair):
        return "no pooling kernel takes negative padding"
    if not all(math.prod(aval.shape) for aval in avals):
        return "an array has no elements"
    axes = [*zip(sizes, strides, padding, strict=True)]
    pooled = [axis for axis, given in enumerate(axes) if given != (1, 1, (0, 0))]
    if not pooled:
        return "every window is one element"
    if len(pooled) == 1 and axes[pooled[0]] in _cumulative(x.shape[pooled[0]]):
        return "XLA has a faster form of cumulative sums and maxima"
    channels_last = pooled[-1] < x.ndim - 1
    spatial = slice(pooled[0], x.ndim - channels_last)
    window = Window(sizes[spatial], strides[spatial], tuple(padding[spatial]), tuple(dilation)[spatial], channels_last)
    shape = (1,) * (window.ndim + 2 - x.ndim) + x.shape
    op, _ = PRIMITIVES[primitive]
    return PoolEquation(PoolProblem(op.name, shape, np.dtype(x.dtype), window), (1, 0) if is_gradient else (0,))


def _cumulative(size: int) -> tuple[Any, Any]:
    """The windows as which JAX lowers cumulative operations along an axis.

    JAX does so after it has decided whether the program needs known devices, which the kernels do.
    """
    return (size, 1, (size - 1, 0)), (size, 1, (0, size - 1))


def plan_equation(
    primitive: Primitive,
    parameters: Mapping[str, Any],
    avals: Sequence[Any],
    platform: str,
    implementation: str | None,
    partitioned: bool = False,
) -> EquationPlan:
    """Plans an equation, as `plan_equation` of `accelerate/lowering.py` says. `partitioned` changes nothing here."""
    op, pass_name = PRIMITIVES[primitive]
    equation = read_equation(primitive, parameters, avals)
    if isinstance(equation, str):
        return EquationPlan(None, "", "xla", equation)
    problem, only = equation.problem, None if implementation is None else platform
    selection = select(op, implementation, problem, passes=(pass_name,), platform=only)
    candidates = supporting(selection.candidates[pass_name], BACKENDS, pass_name, problem)
    candidates = dataclasses.replace(candidates, platform=platform, even_if_slower=implementation is not None)
    explained = explain_pass(selection, pass_name, platform)
    if explained.implementation == "xla":
        if candidates.recorded is not None:
            candidates.recorded.lowered_for(platform)
        return EquationPlan(None, pass_name, "xla", explained.reason)
    *operands, result = avals
    compute = _compute(equation, pass_name, candidates, result.ndim)
    return unless_refused(EquationPlan(compute, pass_name, explained.implementation, explained.reason), operands)


def _compute(equation: PoolEquation, pass_name: str, candidates: Candidates, ndim: int) -> Callable[..., jax.Array]:
    problem = equation.problem
    params = PoolParams(problem.op, problem.window, problem.window.spatial(problem.shape), ((pass_name, candidates),))
    added = tuple(range(len(problem.shape) - ndim))

    def compute(*operands: jax.Array) -> jax.Array:
        ordered = (lax.expand_dims(operands[place], added) for place in equation.operands)
        return lax.squeeze(passes.run(params, pass_name, *ordered), added)

    return compute
