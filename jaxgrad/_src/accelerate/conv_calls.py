"""The convolutions of a program, for `jaxgrad.report`."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from jax.extend.core import JaxprEqn

from jaxgrad._src.accelerate.calls import Convolution
from jaxgrad._src.accelerate.outcomes import SELECTED_BY_OP, outcome_of, selected
from jaxgrad._src.accelerate.places import Place
from jaxgrad._src.conv.call.flops import count_flops
from jaxgrad._src.conv.call.geometry import described
from jaxgrad._src.conv.call.params import ConvParams
from jaxgrad._src.conv.call.problem import PROBLEMS
from jaxgrad._src.conv.passes import candidates_of


def of_lax(equation: JaxprEqn, place: Place, platform: str, problem: str) -> Convolution:
    """A convolution of `jax.lax`; `problem` is why it cannot be accelerated, empty if it can."""
    avals: list[Any] = [variable.aval for variable in (*equation.invars, *equation.outvars)]
    found = outcome_of(equation, platform, problem)
    dn = equation.params["dimension_numbers"]
    specs = zip(avals, dn, ("NC", "OI", "NC"), strict=True)
    lhs, rhs, result = (described(aval.dtype, aval.shape, *spec) for aval, *spec in specs)
    names = ("window_strides", "padding", "lhs_dilation", "rhs_dilation")
    return Convolution(
        source=place.source,
        scope=place.scope,
        shapes=_shapes(lhs, rhs, result),
        **dataclasses.asdict(found),
        flops=_flops(avals, dn, *(equation.params[name] for name in names)),
        repeats=place.repeats,
        lhs=lhs,
        rhs=rhs,
        result=result,
        groups=equation.params["feature_group_count"] * equation.params["batch_group_count"],
    )


def of_op(
    equation: JaxprEqn, name: str, params: ConvParams, flags: Sequence[bool], place: Place, platform: str
) -> Convolution:
    """A call of a pass, by an op of jaxgrad. The passes of independent problems have a first axis of problems.

    `flags` are those of the pass: whether it applies relu, or returns a bias gradient.
    """
    pass_name = name.removeprefix("conv_")
    g = params.geometry
    specs = {
        "forward": ((g.lhs_spec, "NC"), (g.rhs_spec, "OI"), (g.out_spec, "NC")),
        "input_gradient": ((g.out_spec, "NC"), (g.rhs_spec, "OI"), (g.lhs_spec, "NC")),
        "weight_gradient": ((g.lhs_spec, "NC"), (g.out_spec, "NC"), (g.rhs_spec, "OI")),
    }[pass_name]
    avals: list[Any] = [variable.aval for variable in (*equation.invars[:2], equation.outvars[0])]
    lhs, rhs, result = (described(aval.dtype, aval.shape, *spec) for aval, spec in zip(avals, specs, strict=True))
    candidates = dict(params.candidates)[pass_name]
    if candidates.implementations:  # `vmap` may have changed the sizes that they were selected for
        problem = PROBLEMS[pass_name](g, *avals[:2])
        relu = pass_name == "forward" and flags[0]
        has_bias = len(equation.invars) > 2 if pass_name == "forward" else any(flags)
        candidates = candidates_of(pass_name, params, problem, has_bias, relu)
    implementation, moved, reason = selected(candidates, platform)
    order = {"forward": (0, 1, 2), "input_gradient": (2, 1, 0), "weight_gradient": (0, 2, 1)}[pass_name]
    settings = g.window_strides, g.padding, (1,) * len(g.padding), g.rhs_dilation
    return Convolution(
        source=place.source,
        scope=place.scope,
        shapes=_shapes(lhs, rhs, result),
        pass_name=pass_name,
        implementation=implementation,
        reason=reason or SELECTED_BY_OP,
        moved=moved,
        flops=_flops([avals[i] for i in order], g.dimension_numbers, *settings),
        repeats=place.repeats,
        lhs=lhs,
        rhs=rhs,
        result=result,
        groups=g.feature_group_count,
    )


def _shapes(lhs: str, rhs: str, result: str) -> str:
    return f"{lhs}, {rhs} -> {result}"


def _flops(avals: Sequence[Any], specs: Sequence[Sequence[int]], *settings: Any) -> int | None:
    """The flops of a convolution of x and w with the result y, some of which may have axes of problems first."""
    if not all(isinstance(size, int) for aval in avals for size in aval.shape):
        return None
    leading = [aval.ndim - len(spec) for aval, spec in zip(avals, specs, strict=True)]
    problems = max(math.prod(aval.shape[:n]) for aval, n in zip(avals, leading, strict=True))
    x, w, y = (aval.shape[n:] for aval, n in zip(avals, leading, strict=True))
    spatial = [[shape[axis] for axis in spec[2:]] for shape, spec in zip((x, w, y), specs, strict=True)]
    features = w[specs[1][0]] * w[specs[1][1]]
    return count_flops(problems * y[specs[2][0]], features, *spatial, *settings)
