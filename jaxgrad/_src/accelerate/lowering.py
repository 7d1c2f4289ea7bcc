"""The lowering rule of `jax.lax.conv_general_dilated` that computes marked equations with the convolution passes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import cache
from typing import Any

import jax
from jax import lax
from jax.interpreters import mlir

from jaxgrad._src.conv.equation import plan_equation
from jaxgrad._src.core import jax_internals, marks
from jaxgrad._src.core.warn import warn_caller


def install() -> str:
    """Installs the lowering rule. Returns why this release of JAX cannot be accelerated; empty if it can."""
    with _lock:
        return _install_once()


_lock = threading.Lock()


@cache
def _install_once() -> str:
    return jax_internals.install(_lower, _lower_marked_convolution, marks.is_accelerated)


@cache
def installed_or_warn() -> bool:
    """Installs the lowering rule at the first call, and warns if that fails."""
    if problem := install():
        warn_caller(f"jaxgrad.accelerate has no effect: {problem}", RuntimeWarning)
    return not problem


def _lower_marked_convolution() -> None:
    def convolve(x: jax.Array) -> jax.Array:
        with marks.marked(marks.AUTOMATIC):
            return lax.conv(x, x, (1,), "SAME")

    shape = jax.ShapeDtypeStruct((1, 1, 1), "float32")
    jax.jit(convolve).trace(shape).lower(lowering_platforms=("cpu",))


def _lower(original: Callable[..., Any], platform: str, context: Any, lhs: Any, rhs: Any, **parameters: Any) -> Any:
    metadata = jax_internals.metadata(context)
    avals = *context.avals_in, *context.avals_out
    if not marks.is_accelerated(metadata) or jax_internals.needs_rule_of_jax(context) or _lost_64_bits(avals):
        return original(context, lhs, rhs, **parameters)
    partitioned = jax_internals.is_partitioned(context)
    plan = plan_equation(parameters, avals, platform, allowed_implementation(metadata), partitioned)
    if plan.compute is None:
        return original(context, lhs, rhs, **parameters)
    with marks.marked(marks.EXEMPT):  # a convolution that a pass writes on XLA is not planned again
        return mlir.lower_fun(plan.compute, multiple_results=False)(context, lhs, rhs)


def allowed_implementation(metadata: jax_internals.Metadata) -> str | None:
    """The only implementation that the mark of an accelerated equation allows; None for the fastest."""
    mark = marks.mark_in(metadata)
    return None if mark == marks.AUTOMATIC else mark


def _lost_64_bits(avals: tuple[Any, ...]) -> bool:
    """Whether the program was traced with 64-bit types, which have been disabled since."""
    x64 = jax.config.jax_enable_x64  # type: ignore[attr-defined]
    return not x64 and any(aval.dtype.itemsize == 8 for aval in avals)
