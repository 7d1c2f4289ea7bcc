"""Selects how an equation of `jax.lax.conv_general_dilated` is computed, whoever has written it.

read/readings.py reads an equation as the passes that compute it. `plan_equation` takes the first reading for which a
kernel is selected, or which on_xla/xla.py writes in another way than JAX. If a kernel supports a reading but XLA is
faster, the equation stays on XLA.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any

import jax

from jaxgrad._src.choice.explain import explain_pass
from jaxgrad._src.choice.measured_choices import RecordedCall, Recorder
from jaxgrad._src.choice.old_names import current_name, warn_of_old_name
from jaxgrad._src.choice.selection import select, supporting
from jaxgrad._src.choice.settings import current, of_kernels
from jaxgrad._src.conv.api import OP
from jaxgrad._src.conv.backends import BACKENDS
from jaxgrad._src.conv.call.geometry import described
from jaxgrad._src.conv.call.params import ConvCall, ConvParams
from jaxgrad._src.conv.on_xla.forms import form_on_xla
from jaxgrad._src.conv.read.convolution import CROPPED, LaxArguments, LaxConvolution
from jaxgrad._src.conv.read.readings import Reading, fastest_first, measurable, written_first
from jaxgrad._src.core.precision import precision_flags
from jaxgrad._src.run.equation_plan import EquationPlan, unless_refused
from jaxgrad._src.run.mesh_axes import explicit_sharding_of

_AS_STRIDED = "jaxgrad writes it for XLA as the weight gradient of a strided convolution"
_PADDED = "XLA miscompiles the convolution as it is written, so its input is padded in a separate operation"
_ON = " on "  # between a pass and an implementation


@dataclasses.dataclass(frozen=True)
class ConvPlan(EquationPlan):
    """How a convolution is computed on one platform, by a function of lhs and rhs.

    Attributes:
      is_slower: whether jaxgrad has a kernel for the pass, but XLA is faster.
      is_padded: whether `compute` is the convolution on XLA, with lhs padded in a separate operation: XLA miscompiles
        it otherwise.
      computed_as: the pass that computes it, if `compute` is not None. Another one may be faster than `pass_name`.
    """

    is_slower: bool = False
    is_padded: bool = False
    computed_as: str = ""

    @property
    def is_moved(self) -> bool:
        return self.compute is not None and not self.is_padded

    @property
    def name(self) -> str:
        """The name in a tuning: "xla" is the convolution on XLA."""
        return f"{self.computed_as}{_ON}{self.implementation}" if self.is_moved else "xla"


def plan_equation(
    parameters: Mapping[str, Any],
    avals: Sequence[Any],
    platform: str,
    implementation: str | None,
    partitioned: bool = False,
) -> ConvPlan:
    """Plans an equation.

    Args:
      parameters: of the equation.
      avals: shapes and dtypes of lhs, rhs and the result.
      platform: the platform that the program is lowered for.
      implementation: the only one to take, whether or not it is the fastest; None for the fastest.
      partitioned: whether XLA partitions the program over several devices.
    """
    equation = Equation.of(parameters, avals, partitioned)
    plan = _plan(equation, avals[:2], platform, implementation)
    if plan.compute is not None or not equation.is_miscompiled(platform):
        return plan
    reason = f"{plan.reason}; {_PADDED}"
    padded = partial(equation.arguments.call_lax_on_padded, out_sharding=explicit_sharding_of(avals[-1]))
    return dataclasses.replace(plan, compute=padded, reason=reason, is_padded=True)


def _plan(equation: Equation, operands: Sequence[Any], platform: str, implementation: str | None) -> ConvPlan:
    """The plan of an equation, without regard to the faults of XLA."""
    if equation.unsupported:
        return ConvPlan(None, "", "xla", equation.unsupported)
    tuning = current().tuning if implementation is None else None
    if tuning is not None and not tuning.covers(equation, ""):
        tuning = None
    choice = None if tuning is None else tuning.choice(platform, "", equation)
    if choice is not None and (chosen := equation.plan_of(choice.implementation, platform, choice.reason)):
        return unless_refused(chosen, operands)
    plan = unless_refused(equation.plan(platform, implementation), operands)
    if choice is not None:
        reason = f"{plan.reason}; the tuning chooses {choice.implementation!r}, which cannot run"
        plan = dataclasses.replace(plan, reason=reason)
    if isinstance(tuning, Recorder):
        RecordedCall(tuning, "", equation, (plan.name,)).lowered_for(platform)
    return plan


@dataclasses.dataclass(frozen=True)
class Equation(LaxConvolution):
    """An equation of `jax.lax.conv_general_dilated`.

    `partitioned` says whether XLA partitions the program over several devices.
    """

    partitioned: bool = False

    @classmethod
    def of(cls, parameters: Mapping[str, Any], avals: Sequence[Any], partitioned: bool = False) -> Equation:
        names = [field.name for field in dataclasses.fields(LaxArguments) if field.name in parameters]
        arguments = LaxArguments(**{name: parameters[name] for name in names})
        lhs, rhs, result = (jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in avals)
        return cls(arguments, lhs, rhs, result, partitioned)

    @cached_property
    def readings(self) -> tuple[Reading, ...]:
        """Every pass that computes the equation; the one that JAX or the program has written comes first."""
        return tuple(reading for reading in written_first(self.normalized) if min(reading.call.geometry.x_spatial) > 0)

    @property
    def pass_name(self) -> str:
        """The pass that the equation is, as it is written; empty if no pass computes it."""
        return self.readings[0].call.pass_name if self.readings else ""

    def text(self, pass_name: str, platform: str) -> str:
        """The text of the equation in a tuning, whose choice names the pass."""
        a, arrays = self.normalized, (self.lhs, self.rhs, self.result)
        specs = zip(arrays, a.dimension_numbers, ("NC", "OI", "NC"), strict=True)
        texts = (described(array.dtype, array.shape, spec, leading) for array, spec, leading in specs)
        flags = *precision_flags(self.lhs.dtype, self.arguments.precision), *of_kernels().texts(platform)
        return " ".join(["jax.lax", *texts, *a.unusual(), *flags])

    def plan(self, platform: str, implementation: str | None) -> ConvPlan:
        """The plan without a tuning. The operands are those that a pass may take."""
        if self.lhs.dtype != self.result.dtype and platform == "cuda" and implementation is None:
            reason = f"XLA multiplies {self.lhs.dtype.name} without casts to {self.result.dtype.name}"
            return ConvPlan(None, "", "xla", reason)
        if not self.readings:
            has_pass = bool(written_first(self.normalized))
            reason = CROPPED if has_pass else "no pass computes a convolution with these strides and dilations"
            return ConvPlan(None, "", "xla", reason)
        written = self.readings[0]
        found: ConvPlan | None = None
        for reading in fastest_first(self.readings):
            allowed = implementation and current_name(OP, implementation, self._conv_call(reading))
            plan = self.plan_reading(reading, platform, allowed)
            if plan.compute is not None or (plan.is_slower and reading.is_same_kind(written)):
                if plan.implementation == allowed:
                    warn_of_old_name(implementation, allowed)
                return plan
            found = plan if found is None or reading is written else found
        assert found is not None
        return found

    def alternatives(self, platform: str) -> dict[str, Callable[[jax.Array, jax.Array], jax.Array]]:
        """All ways to compute the equation on a platform, by the names that a tuning has for them."""
        padded = self.is_miscompiled(platform)
        found: dict[str, Callable[[jax.Array, jax.Array], jax.Array]] = {
            "xla": self.arguments.call_lax_on_padded if padded else self.arguments.call_lax
        }
        own = [backend.implementation for backend in BACKENDS if backend.platform == platform]
        for reading in measurable(self.readings) if self.readings else ():
            plans = (self.plan_reading(reading, platform, implementation) for implementation in (*own, "xla"))
            found |= {plan.name: plan.compute for plan in plans if plan.compute is not None}
        return found

    def plan_of(self, name: str, platform: str, reason: str) -> ConvPlan | None:
        """The plan that has a name in a tuning; None if it cannot run. The reason says why it is chosen."""
        if name == "xla":
            return ConvPlan(None, self.pass_name, "xla", reason, is_slower=True)
        computed_as, _, implementation = name.rpartition(_ON)
        for reading in self.readings:
            if reading.call.pass_name == computed_as:
                plan = self.plan_reading(reading, platform, implementation)
                if plan.compute is not None and plan.implementation == implementation:
                    return dataclasses.replace(plan, reason=reason)
        return None

    def _conv_call(self, reading: Reading) -> ConvCall:
        """The call that a reading makes, as the backends are asked about it."""
        return ConvCall(reading.call.problem(self.result.dtype), self.arguments.precision, of_kernels())

    def plan_reading(self, reading: Reading, platform: str, implementation: str | None) -> ConvPlan:
        """The plan of one reading; its `compute` is None where the implementation, or the fastest one, has none."""
        call, precision, dtype = reading.call, self.arguments.precision, self.result.dtype
        conv_call = self._conv_call(reading)
        problem = conv_call.problem
        selection = select(OP, implementation, conv_call, passes=(call.pass_name,), platform=platform)
        candidates = dataclasses.replace(selection.candidates[call.pass_name], platform=platform)
        if problem.num_problems or (reading.of_one_group is not None and self.partitioned):
            candidates = dataclasses.replace(candidates, even_if_slower=implementation is not None, call=None)
            candidates = supporting(candidates, BACKENDS, call.pass_name, conv_call)
        reason = explain_pass(selection, call.pass_name, platform).reason
        form = form_on_xla(call.pass_name, problem, platform)
        if not candidates.implementations:
            is_slower = any(rejection is not None and rejection.slower for rejection in selection.rejections.values())
            if selection.candidates[call.pass_name].implementations:
                reason, is_slower = "XLA is faster for several independent problems", True
                reason += f"; {form}" if form else ""
            if not form and not reading.is_of_transposed:
                return ConvPlan(None, self.pass_name, "xla", reason, is_slower)
            if not form:
                reason += f"; {_AS_STRIDED}"
        params = ConvParams(call.geometry, precision, ((call.pass_name, candidates),), of_kernels())

        def compute(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
            lhs, rhs = (array.astype(dtype) for array in (lhs, rhs))
            return reading.compute(params, lhs, rhs, self.partitioned)

        implementation = (*candidates.implementations, "xla")[0]
        return ConvPlan(compute, self.pass_name, implementation, reason, computed_as=call.pass_name)
