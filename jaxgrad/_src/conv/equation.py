"""Selects how an equation of `jax.lax.conv_general_dilated` is computed, whoever has written it.

JAX writes gradients as convolutions: the input gradient with input dilation and a reversed window, the weight gradient
with the batch as features and a window as large as dy. `plan_equation` reads an equation by its shapes as the passes
that compute it. It takes the first reading for which a kernel is selected, or which conv/xla.py writes in another way
than JAX. If a kernel supports a reading but XLA is faster, the equation stays on XLA.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import jax
from jax.sharding import NamedSharding

from jaxgrad._src.conv.api import OP
from jaxgrad._src.conv.backends import BACKENDS
from jaxgrad._src.conv.canonicalize import LaxArguments, is_miscompiled_by_xla, normalize, unsupported_operands
from jaxgrad._src.conv.geometry import described
from jaxgrad._src.conv.params import ConvCall, ConvParams
from jaxgrad._src.conv.pass_calls import (
    ConvArguments,
    PassCall,
    forward_call,
    input_gradient_call,
    weight_gradient_call,
)
from jaxgrad._src.conv.xla_forms import form_on_xla
from jaxgrad._src.core.batching import fold, unfold
from jaxgrad._src.core.explain import explain_pass
from jaxgrad._src.core.jax_internals import ShardingTypeError
from jaxgrad._src.core.mesh_axes import explicit_sharding_of
from jaxgrad._src.core.precision import precision_flags
from jaxgrad._src.core.selection import select_pass, supporting
from jaxgrad._src.core.settings import current, of_kernels
from jaxgrad._src.core.tuning import RecordedCall, Recorder
from jaxgrad._src.selection.conv_readings import (
    prefers_input_gradient,
    prefers_matrix_product,
    prefers_product_of_patches,
    prefers_weight_gradient,
)

_AS_STRIDED = "jaxgrad writes it for XLA as the weight gradient of a strided convolution"
_ON = " on "  # between a pass and an implementation


@dataclasses.dataclass(frozen=True)
class EquationPlan:
    """How an equation is computed on one platform.

    Attributes:
      compute: the function (lhs, rhs) -> result; None if XLA lowers the convolution as it is.
      pass_name: the pass that computes it, or that was tried first; empty if the convolution has no reading.
      implementation: what runs it. On "xla", `compute` may be a matrix product or another convolution.
      reason: why, in one sentence.
      is_slower: whether jaxgrad has a kernel for the pass, but XLA is faster.
      is_padded: whether `compute` is the convolution on XLA, whose lhs is padded before: XLA miscompiles it otherwise.
    """

    compute: Callable[[jax.Array, jax.Array], jax.Array] | None
    pass_name: str
    implementation: str
    reason: str
    is_slower: bool = False
    is_padded: bool = False

    @property
    def name(self) -> str:
        """The name in a tuning: "xla" is the convolution on XLA."""
        return "xla" if self.compute is None or self.is_padded else f"{self.pass_name}{_ON}{self.implementation}"


@dataclasses.dataclass(frozen=True)
class _Reading:
    """A pass that computes the equation, after its batch groups become feature groups.

    With batch groups, `of_one_group` is the pass of a single group.
    """

    call: PassCall
    arguments: ConvArguments
    batch_groups: int = 1
    of_one_group: PassCall | None = None

    @property
    def is_of_transposed(self) -> bool:
        """Whether it is the weight gradient of a transposed convolution, for which XLA has no kernel as JAX writes it.

        JAX writes it with input dilation; conv/xla.py as the weight gradient of the convolution that is transposed.
        """
        return self.call.pass_name == "weight_gradient" and self.arguments.is_input_dilated

    def regrouped(self, lhs: jax.Array) -> jax.Array:
        if self.batch_groups == 1:
            return lhs
        batch, feature, *_ = self.arguments.dimension_numbers.lhs_spec
        return fold(unfold(lhs, batch, self.batch_groups), feature)

    def compute(self, params: ConvParams, lhs: jax.Array, rhs: jax.Array, partitioned: bool = False) -> jax.Array:
        """The result. In a partitioned program, batch groups are independent problems, which a mesh may split."""
        if self.of_one_group is None or not partitioned:
            return self.call.compute(params, self.regrouped(lhs), rhs)
        of_lhs, of_rhs, of_result = self.arguments.dimension_numbers
        params = dataclasses.replace(params, geometry=self.of_one_group.geometry)
        groups = unfold(lhs, of_lhs[0], self.batch_groups), unfold(rhs, of_rhs[0], self.batch_groups)
        return fold(jax.vmap(partial(self.of_one_group.compute, params))(*groups), of_result[1])


def plan_equation(
    parameters: Mapping[str, Any],
    avals: Sequence[Any],
    platform: str,
    implementation: str | None,
    partitioned: bool = False,
) -> EquationPlan:
    """Plans an equation.

    Args:
      parameters: of the equation.
      avals: shapes and dtypes of lhs, rhs and the result.
      platform: the platform that the program is lowered for.
      implementation: the only one to take, whether or not it is the fastest; None for the fastest.
      partitioned: whether XLA partitions the program over several devices.
    """
    equation = Equation.of(parameters, avals, partitioned)
    shardings = [explicit_sharding_of(aval) for aval in avals]
    plan = _plan(equation, shardings, platform, implementation)
    if plan.compute is not None or not equation.is_miscompiled(platform):
        return plan
    reason = f"{plan.reason}; XLA miscompiles the convolution as it is written, so it is padded before"
    padded = partial(equation.arguments.call_lax_on_padded, out_sharding=shardings[-1])
    return dataclasses.replace(plan, compute=padded, reason=reason, is_padded=True)


_Shardings = Sequence[NamedSharding | None]  # of lhs, rhs and the result, over explicit mesh axes


def _unless_refused(plan: EquationPlan, equation: Equation, shardings: _Shardings) -> EquationPlan:
    """The plan; that of XLA if JAX refuses to compute the pass from operands that are sharded so."""
    if plan.compute is None or not any(shardings):
        return plan
    arrays = zip((equation.lhs, equation.rhs), shardings, strict=False)
    operands = [jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding) for array, sharding in arrays]
    try:
        jax.eval_shape(plan.compute, *operands)
    except ShardingTypeError as error:
        said = str(error).splitlines()[0]
        reason = f"JAX refuses to compute the pass from arrays that are sharded so over explicit mesh axes: {said}"
        return EquationPlan(None, plan.pass_name, "xla", reason)
    return plan


def _plan(equation: Equation, shardings: _Shardings, platform: str, implementation: str | None) -> EquationPlan:
    """The plan of an equation, without regard to the faults of XLA."""
    if reason := unsupported_operands(equation.lhs, equation.rhs, equation.result):
        return EquationPlan(None, "", "xla", reason)
    tuning = current().tuning if implementation is None else None
    if tuning is not None and not tuning.covers(equation, ""):
        tuning = None
    if tuning is not None and (choice := tuning.choice(platform, "", equation)):
        return _unless_refused(equation.plan_of(choice.implementation, platform, choice.reason), equation, shardings)
    plan = _unless_refused(equation.plan(platform, implementation), equation, shardings)
    if isinstance(tuning, Recorder):
        RecordedCall(tuning, "", equation, (plan.name,)).lowered_for(platform)
    return plan


@dataclasses.dataclass(frozen=True)
class Equation:
    """An equation of `jax.lax.conv_general_dilated`: its arguments, and the shapes and dtypes of its arrays.

    `partitioned` says whether XLA partitions the program over several devices.
    """

    arguments: LaxArguments
    lhs: Any
    rhs: Any
    result: Any
    partitioned: bool = False

    @classmethod
    def of(cls, parameters: Mapping[str, Any], avals: Sequence[Any], partitioned: bool = False) -> Equation:
        names = [field.name for field in dataclasses.fields(LaxArguments) if field.name in parameters]
        arguments = LaxArguments(**{name: parameters[name] for name in names})
        lhs, rhs, result = (jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in avals)
        return cls(arguments, lhs, rhs, result, partitioned)

    @property
    def normalized(self) -> ConvArguments:
        return normalize(self.arguments, self.lhs.shape, self.rhs.shape, self.result.shape)

    def is_miscompiled(self, platform: str) -> bool:
        shapes = self.lhs.shape, self.rhs.shape, self.result.shape
        return is_miscompiled_by_xla(self.arguments, *shapes, only_on=platform)

    def text(self, pass_name: str, platform: str) -> str:
        """The text of the equation in a tuning, whose choice names the pass."""
        a, arrays = self.normalized, (self.lhs, self.rhs, self.result)
        specs = zip(arrays, a.dimension_numbers, ("NC", "OI", "NC"), strict=True)
        texts = (described(array.dtype, array.shape, spec, leading) for array, spec, leading in specs)
        flags = *precision_flags(self.lhs.dtype, self.arguments.precision), *of_kernels().texts(platform)
        return " ".join(["jax.lax", *texts, *a.unusual(), *flags])

    def plan(self, platform: str, implementation: str | None) -> EquationPlan:
        """The plan without a tuning. The operands are those that a pass may take."""
        if self.lhs.dtype != self.result.dtype and platform == "cuda" and implementation is None:
            reason = f"XLA multiplies {self.lhs.dtype.name} without casts to {self.result.dtype.name}"
            return EquationPlan(None, "", "xla", reason)
        first, reason = None, "no pass computes a convolution with these strides and dilations"
        for reading in _readings(self.normalized):
            if min(reading.call.geometry.x_spatial) > 0:
                plan = self.plan_reading(reading, platform, implementation)
                first = first or plan
                if plan.compute is not None:
                    return plan
                if plan.is_slower:
                    break
            else:
                reason = "cropping leaves no input; runs on XLA"
        return first or EquationPlan(None, "", "xla", reason)

    def alternatives(self, platform: str) -> dict[str, Callable[[jax.Array, jax.Array], jax.Array]]:
        """All ways to compute the equation on a platform, by the names that a tuning has for them."""
        padded = self.is_miscompiled(platform)
        found: dict[str, Callable[[jax.Array, jax.Array], jax.Array]] = {
            "xla": self.arguments.call_lax_on_padded if padded else self.arguments.call_lax
        }
        backends = [backend for backend in BACKENDS if backend.platform == platform]
        for reading in _readings(self.normalized):
            if min(reading.call.geometry.x_spatial) > 0:
                pass_name, call = reading.call.pass_name, self._conv_call(reading)
                own = [each.implementation for each in backends if not each.repeats_another(pass_name, call)]
                plans = (self.plan_reading(reading, platform, implementation) for implementation in (*own, "xla"))
                found |= {plan.name: plan.compute for plan in plans if plan.compute is not None}
        return found

    def plan_of(self, name: str, platform: str, reason: str) -> EquationPlan:
        """The plan that has a name in a tuning. The reason says why it is chosen."""
        pass_name, _, implementation = name.rpartition(_ON)
        readings = [each for each in _readings(self.normalized) if min(each.call.geometry.x_spatial) > 0]
        if not pass_name:  # XLA, as the equation is: no kernel is planned, and its pass is that of the first reading
            pass_name = readings[0].call.pass_name if readings else ""
            return EquationPlan(None, pass_name, "xla", reason, is_slower=True)
        for reading in readings:
            if reading.call.pass_name == pass_name:
                plan = self.plan_reading(reading, platform, implementation)
                return dataclasses.replace(plan, reason=reason) if plan.implementation == implementation else plan
        return EquationPlan(None, pass_name, "xla", reason, is_slower=True)

    def _conv_call(self, reading: _Reading) -> ConvCall:
        """The call that a reading makes."""
        lhs: Any
        rhs: Any
        lhs, rhs = (jax.ShapeDtypeStruct(array.shape, self.result.dtype) for array in (self.lhs, self.rhs))
        problem = reading.call.problem(jax.eval_shape(reading.regrouped, lhs), rhs)
        transposed = reading.arguments.is_input_dilated
        return ConvCall(problem, self.arguments.precision, of_kernels(), transposed=transposed)

    def plan_reading(self, reading: _Reading, platform: str, implementation: str | None) -> EquationPlan:
        """The plan of one reading; its `compute` is None where the implementation, or the fastest one, has none."""
        call, precision, dtype = reading.call, self.arguments.precision, self.result.dtype
        conv_call = self._conv_call(reading)
        problem = conv_call.problem
        selection = select_pass(OP, call.pass_name, conv_call, platform, implementation)
        candidates = selection.candidates[call.pass_name]
        if problem.num_problems or (reading.of_one_group is not None and self.partitioned):
            candidates = dataclasses.replace(candidates, even_if_slower=implementation is not None)
            candidates = supporting(candidates, BACKENDS, call.pass_name, conv_call)
        reason = explain_pass(selection, call.pass_name, platform).reason
        form = form_on_xla(call.pass_name, problem, platform)
        if not candidates.implementations:
            is_slower = any(rejection is not None and rejection.slower for rejection in selection.rejections.values())
            if selection.candidates[call.pass_name].implementations:
                reason, is_slower = "XLA is faster for several independent problems", True
                reason += f"; {form}" if form else ""
            if not form and not reading.is_of_transposed:
                return EquationPlan(None, call.pass_name, "xla", reason, is_slower)
            if not form:
                reason += f"; {_AS_STRIDED}"
        params = ConvParams(call.geometry, precision, ((call.pass_name, candidates),), of_kernels())

        def compute(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
            lhs, rhs = (array.astype(dtype) for array in (lhs, rhs))
            return reading.compute(params, lhs, rhs, self.partitioned)

        return EquationPlan(compute, call.pass_name, (*candidates.implementations, "xla")[0], reason)


def _readings(a: ConvArguments) -> Iterator[_Reading]:
    """The readings of an equation, in the order in which they are tried.

    A convolution is read either by its window, as a forward pass or an input gradient, or as a weight gradient. The
    slower one of the two is used only if the other does not exist. Readings whose windows do not overlap come first:
    they are matrix products.
    """
    by_window, gradient = list(_by_window(a)), list(_as_weight_gradient(a))
    lhs_spatial = [a.lhs_shape[axis] for axis in a.dimension_numbers.lhs_spec[2:]]
    products = by_window + (gradient if prefers_product_of_patches(a.window, a.out_spatial, lhs_spatial) else [])
    disjoint = [reading for reading in products if reading.call.geometry.has_disjoint_windows]
    if disjoint:
        yield from disjoint
        return
    if not prefers_weight_gradient(a.window, a.out_spatial):
        yield from by_window or gradient
        return
    if prefers_matrix_product(*a.dimension_numbers[:2]):
        yield from (reading for reading in by_window if reading.call.geometry.is_matrix_product)
    yield from gradient or by_window


def _as_weight_gradient(a: ConvArguments) -> Iterator[_Reading]:
    if not a.is_input_dilated or max(a.rhs_dilation) == 1:
        yield _Reading(weight_gradient_call(a), a)


def _by_window(a: ConvArguments) -> Iterator[_Reading]:
    """The readings as a forward pass and as an input gradient."""
    groups = a.batch_group_count
    of_one_group = dataclasses.replace(a, batch_group_count=1)  # of the features, calls take the number of groups only
    if groups > 1:
        lhs_shape = list(a.lhs_shape)
        batch, feature, *_ = a.dimension_numbers.lhs_spec
        lhs_shape[batch] //= groups
        lhs_shape[feature] *= groups
        a = dataclasses.replace(a, lhs_shape=tuple(lhs_shape), feature_group_count=groups, batch_group_count=1)

    def reading(call_of: Callable[[ConvArguments], PassCall]) -> _Reading:
        return _Reading(call_of(a), a, groups, call_of(of_one_group) if groups > 1 else None)

    forward = [] if a.is_input_dilated else [reading(forward_call)]
    transposed_first = prefers_input_gradient(*a.dimension_numbers[:2])  # JAX wrote it, and reversed rhs
    transposed = [] if a.is_strided else [reading(partial(input_gradient_call, rhs_is_reversed=transposed_first))]
    yield from (*transposed, *forward) if transposed_first else (*forward, *transposed)
