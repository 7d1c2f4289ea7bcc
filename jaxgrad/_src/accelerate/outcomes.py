"""What the calls of a program run on, for `jaxgrad.report`."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

from jax.extend.core import JaxprEqn

from jaxgrad._src.accelerate.lowering import allowed_implementation, plan_equation
from jaxgrad._src.choice.candidates import Candidates
from jaxgrad._src.choice.op import lowering_platform, platform_of
from jaxgrad._src.conv import api
from jaxgrad._src.core import jax_internals, marks

SELECTED_BY_OP = "selected by the op of jaxgrad"


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Attributes of a `Call`."""

    pass_name: str
    implementation: str
    reason: str
    moved: str = ""


def outcome_of(equation: JaxprEqn, platform: str, problem: str) -> Outcome:
    """What an equation of `jax.lax` runs on; `problem` is why it cannot be accelerated, empty if it can."""
    metadata = jax_internals.equation_metadata(equation)
    if _called_by_op(equation):
        return Outcome("", "xla", SELECTED_BY_OP)
    if problem:
        return Outcome("", "xla", problem)
    if marks.mark_in(metadata) is None:
        return Outcome("", "xla", "not accelerated")
    if not marks.is_accelerated(metadata):
        return Outcome("", "xla", "acceleration is switched off")
    allowed = allowed_implementation(metadata)
    avals: list[Any] = [variable.aval for variable in (*equation.invars, *equation.outvars)]
    plan = plan_equation(equation.primitive, equation.params, avals, lowering_platform(platform), allowed)
    moved = "" if not plan.is_moved else "forced" if allowed else "selected"
    return Outcome(plan.pass_name, plan.implementation, plan.reason, moved)


def selected(candidates: Candidates, platform: str) -> tuple[str, str, str]:
    """Returns `implementation` and `moved` of a call by an op of jaxgrad, and why if the program raises an error."""
    here, forced = lowering_platform(platform), candidates.forced
    implementation = next((name for name in candidates.implementations if platform_of(name) == here), "xla")
    if forced and platform_of(forced.implementation) != here:
        reason = f"implementation={forced.implementation!r} of the op raises ValueError on this platform"
        return implementation, "", reason
    return implementation, "" if implementation == "xla" else "forced" if forced else "selected", ""


def _called_by_op(equation: JaxprEqn) -> bool:
    frames = jax_internals.frames(equation)
    return any(os.path.abspath(frame.file_name) == os.path.abspath(api.__file__) for frame in frames)
