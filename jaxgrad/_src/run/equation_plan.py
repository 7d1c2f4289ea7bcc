"""How an equation of an accelerated program is computed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax

from jaxgrad._src.core.jax_internals import ShardingTypeError
from jaxgrad._src.run.mesh_axes import explicit_sharding_of

_Plan = TypeVar("_Plan", bound="EquationPlan")


@dataclasses.dataclass(frozen=True)
class EquationPlan:
    """How an equation is computed on one platform.

    Attributes:
      compute: the function of the equation's operands; None if XLA lowers the equation as it is.
      pass_name: the pass that the equation is, as JAX or the program has written it; empty if it is none.
      implementation: what runs it. On "xla", `compute` may be another form of the equation.
      reason: why, in one sentence.
    """

    compute: Callable[..., jax.Array] | None
    pass_name: str
    implementation: str
    reason: str

    @property
    def is_moved(self) -> bool:
        """Whether the equation runs in place of XLA's code for it."""
        return self.compute is not None


def unless_refused(plan: _Plan, operands: Sequence[Any]) -> _Plan:
    """The plan; the plan of XLA where JAX refuses to compute the pass from operands with these types."""
    if plan.compute is None or not any(map(explicit_sharding_of, operands)):
        return plan
    shapes = [jax.ShapeDtypeStruct(o.shape, o.dtype, sharding=explicit_sharding_of(o)) for o in operands]
    try:
        jax.eval_shape(plan.compute, *shapes)
    except ShardingTypeError as error:
        said = str(error).splitlines()[0]
        reason = f"JAX refuses to compute the pass from arrays with these shardings over explicit mesh axes: {said}"
        return dataclasses.replace(plan, compute=None, implementation="xla", reason=reason)
    return plan
