"""The lowering rule that computes marked equations of `jax.lax` with the passes of jaxgrad's ops."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import mlir

from jaxgrad._src.conv import equation as conv_equation
from jaxgrad._src.core import jax_internals, marks
from jaxgrad._src.core.warn import warn_caller
from jaxgrad._src.pool import equation as pool_equation
from jaxgrad._src.run.equation_plan import EquationPlan

_PLANNERS: dict[Primitive, Callable[..., EquationPlan]] = {
    lax.conv_general_dilated_p: conv_equation.plan_equation,
    **{primitive: partial(pool_equation.plan_equation, primitive) for primitive in pool_equation.PRIMITIVES},
}
PRIMITIVES = frozenset(_PLANNERS)


def install() -> str:
    """Installs the lowering rules. Returns why this release of JAX cannot be accelerated; empty if it can."""
    with _lock:
        return _install_once()


_lock = threading.Lock()


@cache
def _install_once() -> str:
    return jax_internals.install(PRIMITIVES, _lower, _lower_marked, marks.is_accelerated)


@cache
def installed_or_warn() -> bool:
    """Installs the lowering rules at the first call, and warns if that fails."""
    if problem := install():
        warn_caller(f"jaxgrad.accelerate has no effect: {problem}", RuntimeWarning)
    return not problem


def _lower_marked() -> None:
    def convolve_and_pool(x: jax.Array) -> jax.Array:
        with marks.marked(marks.AUTOMATIC):
            y = lax.conv(x, x, (1,), "SAME")
            total = lax.reduce_window(y, 0.0, lax.add, (1, 1, 2), (1, 1, 1), "SAME")
            return lax.reduce_window(total, -jnp.inf, lax.max, (1, 1, 2), (1, 1, 1), "SAME")

    def value_and_gradient(x: jax.Array) -> Any:
        y, pullback = jax.vjp(convolve_and_pool, x)
        return y, pullback(y)

    shape = jax.ShapeDtypeStruct((1, 1, 1), "float32")
    jax.jit(value_and_gradient).trace(shape).lower(lowering_platforms=("cpu",))


def plan_equation(
    primitive: Primitive,
    parameters: Mapping[str, Any],
    avals: Sequence[Any],
    platform: str,
    implementation: str | None,
    partitioned: bool = False,
) -> EquationPlan:
    """Plans an equation.

    Args:
      primitive: one of `PRIMITIVES`.
      parameters: of the equation.
      avals: shapes and dtypes of its operands and its result.
      platform: the platform that the program is lowered for.
      implementation: the only one to take, whether or not it is the fastest; None for the fastest.
      partitioned: whether XLA partitions the program over several devices.
    """
    return _PLANNERS[primitive](parameters, avals, platform, implementation, partitioned)


def _lower(
    primitive: Primitive, original: Callable[..., Any], platform: str, context: Any, *operands: Any, **parameters: Any
) -> Any:
    metadata = jax_internals.metadata(context)
    avals = *context.avals_in, *context.avals_out
    if not marks.is_accelerated(metadata) or jax_internals.needs_rule_of_jax(context) or _lost_64_bits(avals):
        return original(context, *operands, **parameters)
    partitioned = jax_internals.is_partitioned(context)
    plan = plan_equation(primitive, parameters, avals, platform, allowed_implementation(metadata), partitioned)
    if plan.compute is None:
        return original(context, *operands, **parameters)
    with marks.marked(marks.EXEMPT):  # an equation that a pass writes on XLA is not planned again
        return mlir.lower_fun(plan.compute, multiple_results=False)(context, *operands)


def allowed_implementation(metadata: jax_internals.Metadata) -> str | None:
    """The only implementation that the mark of an accelerated equation allows; None for the fastest."""
    mark = marks.mark_in(metadata)
    return None if mark == marks.AUTOMATIC else mark


def _lost_64_bits(avals: tuple[Any, ...]) -> bool:
    """Whether the program was traced with 64-bit types, which have been disabled since."""
    x64 = jax.config.jax_enable_x64  # type: ignore[attr-defined]
    return not x64 and any(aval.dtype.itemsize == 8 for aval in avals)
