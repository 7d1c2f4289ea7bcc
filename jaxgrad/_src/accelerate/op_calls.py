"""The normalizations, poolings and GRUs of a program, for `jaxgrad.report`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from jax.extend.core import JaxprEqn

from jaxgrad._src.accelerate.calls import Call
from jaxgrad._src.accelerate.outcomes import SELECTED_BY_OP, outcome_of, selected
from jaxgrad._src.accelerate.places import Place
from jaxgrad._src.choice.candidates import Candidates
from jaxgrad._src.choice.explain import explain_pass
from jaxgrad._src.choice.op import OPS, Op, lowering_platform
from jaxgrad._src.choice.selection import recording, select
from jaxgrad._src.gru import api as gru
from jaxgrad._src.gru.flops import count_flops
from jaxgrad._src.gru.params import GruParams
from jaxgrad._src.gru.passes import candidates_of as gru_candidates
from jaxgrad._src.native.ffi import short_dtype
from jaxgrad._src.norm.params import NormParams
from jaxgrad._src.norm.passes import candidates_of as norm_candidates
from jaxgrad._src.pool import api as pool
from jaxgrad._src.pool.equation import PRIMITIVES, read_equation
from jaxgrad._src.pool.params import PoolParams
from jaxgrad._src.pool.passes import candidates_of as pool_candidates


def of_lax_pooling(equation: JaxprEqn, place: Place, platform: str, problem: str) -> Call:
    """A pooling of `jax.lax`; `problem` is why it cannot be accelerated, empty if it can."""
    avals: list[Any] = [variable.aval for variable in (*equation.invars, *equation.outvars)]
    op, _ = PRIMITIVES[equation.primitive]
    read = read_equation(equation.primitive, equation.params, avals)
    texts = [f"{short_dtype(aval.dtype)}[{','.join(map(str, aval.shape))}]" for aval in avals]
    shapes = f"{', '.join(texts[:-1])} -> {texts[-1]}" if isinstance(read, str) else read.problem.text("", "")
    found = dataclasses.asdict(outcome_of(equation, platform, problem))
    return Call(
        op=op.name, source=place.source, scope=place.scope, shapes=shapes, flops=0, repeats=place.repeats, **found
    )


def of_op(
    equation: JaxprEqn,
    name: str,
    params: NormParams | GruParams | PoolParams,
    flags: Sequence[Any],
    place: Place,
    platform: str,
) -> Call:
    """A call of a pass.

    Args:
      equation: the call, whose first operands are those of the pass.
      name: the name of the jitted pass, such as "gru_forward".
      params: the static arguments of the op.
      flags: those of the pass.
      place: of the equation.
      platform: "cpu" or "gpu".
    """
    avals: list[Any] = [variable.aval for variable in equation.invars]
    x, *others = avals
    pass_name = "backward" if name.endswith("backward") else "forward"
    is_symbolic = not all(isinstance(size, int) for size in x.shape)
    call: Any
    candidates: Candidates
    if isinstance(params, GruParams):
        short, op = "gru", gru.OP
        call = params.problem(x, others[1])
        candidates = gru_candidates(params, pass_name, call)
        flops = None if is_symbolic else count_flops(call, flags[0] if pass_name == "backward" else None)
    elif isinstance(params, PoolParams):
        short, flops = params.op, 0
        op = pool.MAX_POOL if short == "max_pool" else pool.AVG_POOL
        pass_name = name.removeprefix(f"{short}_")
        call = params.problem(x)
        candidates = pool_candidates(params, pass_name, call)
    else:
        short, op = params.name, OPS[params.op]
        call, flops = params.problem(x), 0
        in_steps = name.endswith("_normalize") or params.mesh_axes is not None
        candidates = norm_candidates(params, pass_name, call, flags[0] if flags else None, in_steps=in_steps)
    here = lowering_platform(platform)
    implementation, moved, reason = selected(candidates, platform)
    return Call(
        op=short,
        source=place.source,
        scope=place.scope,
        shapes=call.text(pass_name, here),
        pass_name=pass_name,
        implementation=implementation,
        reason=reason or _reason(op, pass_name, call, candidates, implementation, here, is_symbolic),
        moved=moved,
        flops=flops,
        repeats=place.repeats,
    )


def _reason(
    op: Op, pass_name: str, call: Any, candidates: Candidates, implementation: str, platform: str, is_symbolic: bool
) -> str:
    """Why an implementation runs a pass."""
    if is_symbolic:
        return "symbolic shapes run on XLA"
    if candidates.forced:
        return f"forced by implementation={candidates.forced.implementation!r}"
    if candidates.tuning is not None and (choice := candidates.tuning.choice(platform, pass_name, call)):
        return choice.reason
    with recording():
        selection = select(op, None, call, passes=(pass_name,), platform=platform)
    explained = explain_pass(selection, pass_name, platform)
    return explained.reason if explained.implementation == implementation else SELECTED_BY_OP
