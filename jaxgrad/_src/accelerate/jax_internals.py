"""The private names of JAX that `jaxgrad.accelerate` depends on. `install` checks them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import partial, wraps
from typing import Any

import jax
from jax import lax
from jax.extend.core import Jaxpr, JaxprEqn, subjaxprs
from jax.interpreters import mlir

from jaxgrad._src.core import marks

_PLATFORMS = ("cpu", "cuda")

Function = Callable[..., Any]


def install(rule: Function) -> str:
    """Makes `rule` the lowering rule of convolutions, after a check that JAX calls such a rule with the mark.

    Args:
      rule: called with JAX's own rule, the platform, and the arguments of a lowering rule: context, operands and, as
        keyword arguments, the parameters of the equation.

    Returns:
      What this release of JAX lacks, in which case nothing is changed; empty if nothing.
    """
    found: list[str | None] = []
    thread = threading.get_ident()  # others may lower convolutions at the same time

    def checked(original: Function, platform: str, context: Any, *operands: Any, **parameters: Any) -> Any:
        if threading.get_ident() == thread:
            found.append(mark(context))
            custom_partitioning_is_refused(context)
        return original(context, *operands, **parameters)

    try:
        from jax._src import dispatch

        requires_devices = dispatch.jaxpr_has_prim_requiring_devices
        rules = {platform: _rule_of_jax(platform) for platform in _PLATFORMS}
        try:
            _register(checked, rules)
            _lower_marked_convolution(requires_devices)
        finally:
            for platform, original in rules.items():
                mlir.register_lowering(lax.conv_general_dilated_p, original, platform=platform)
        if found != [marks.AUTOMATIC]:
            raise RuntimeError(f"a marked convolution reaches its lowering rule with the marks {found}")
    except Exception as error:  # whatever a release of JAX that was rewritten raises
        return (
            f"jax {jax.__version__} differs from the releases that jaxgrad supports ({type(error).__name__}: {error})"
        )
    _register(rule, rules)
    setattr(dispatch, "jaxpr_has_prim_requiring_devices", _or_has_marked_convolution(requires_devices))  # noqa: B010
    return ""


def mark(context: Any) -> str | None:
    """The mark of the equation that a lowering rule is called for."""
    return _mark_of(context.jaxpr_eqn_ctx)


def mark_of_equation(equation: JaxprEqn) -> str | None:
    """The mark of an equation of a jaxpr."""
    return _mark_of(equation.ctx)


def _mark_of(equation_context: Any) -> str | None:
    return dict(equation_context.xla_metadata or {}).get(marks.MARK)


def equations(jaxpr: Jaxpr) -> Iterator[JaxprEqn]:
    """The equations of a jaxpr and of the jaxprs in their parameters."""
    yield from jaxpr.eqns
    for inner in subjaxprs(jaxpr):
        yield from equations(inner)


def frames(equation: JaxprEqn) -> list[Any]:
    """The frames that traced an equation, the innermost first; each has file_name, line_num and function_name."""
    traceback = equation.source_info.traceback
    return [] if traceback is None else traceback.frames


def custom_partitioning_is_refused(context: Any) -> bool:
    """Whether JAX cannot lower `custom_partitioning`, which the passes need outside `shard_map` on several devices.

    It cannot in a program that is exported, that XLA partitions by GSPMD, or whose devices are not known.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.manual_axes or mesh.explicit_axes:
        return False
    axis_context = context.module_context.axis_context
    if axis_context.num_devices == 1:
        return False
    shardy = jax.config.jax_use_shardy_partitioner  # type: ignore[attr-defined]
    for_export = context.module_context.lowering_parameters.for_export
    return axis_context.device_assignment is None or not shardy or for_export


def _rule_of_jax(platform: str) -> Function:
    entry = mlir._platform_specific_lowerings[platform].get(lax.conv_general_dilated_p)
    return (entry or mlir._lowerings[lax.conv_general_dilated_p]).rule


def _register(rule: Function, rules: dict[str, Function]) -> None:
    for platform, original in rules.items():
        mlir.register_lowering(lax.conv_general_dilated_p, partial(rule, original, platform), platform=platform)


def _or_has_marked_convolution(requires_devices: Function) -> Function:
    """JAX's check whether lowering needs the devices of the program, which a marked convolution does over a mesh.

    JAX asks for each primitive. The primitive of convolutions must not always need devices: a program without marks
    could then not be lowered for an abstract mesh.
    """

    @wraps(requires_devices)
    def check(jaxpr: Jaxpr) -> bool:
        return bool(requires_devices(jaxpr)) or any(map(_is_marked_convolution, equations(jaxpr)))

    return check


def _is_marked_convolution(equation: JaxprEqn) -> bool:
    return equation.primitive is lax.conv_general_dilated_p and mark_of_equation(equation) not in (None, marks.EXEMPT)


def _lower_marked_convolution(requires_devices: Function) -> None:
    def convolve(x: jax.Array) -> jax.Array:
        with marks.marked(marks.AUTOMATIC):
            return lax.conv(x, x, (1,), "SAME")

    traced = jax.jit(convolve).trace(jax.ShapeDtypeStruct((1, 1, 1), "float32"))
    (equation,) = equations(traced.jaxpr.jaxpr)
    if requires_devices(traced.jaxpr.jaxpr) or not _is_marked_convolution(equation):
        raise RuntimeError(f"a marked convolution is traced as {equation}")
    traced.lower(lowering_platforms=("cpu",))
