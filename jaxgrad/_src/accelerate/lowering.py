"""The lowering rule of `jax.lax.conv_general_dilated` that computes marked equations with the convolution passes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import cache
from typing import Any

from jax.interpreters import mlir

from jaxgrad._src.accelerate import jax_internals
from jaxgrad._src.conv.equation import plan_equation
from jaxgrad._src.core import marks
from jaxgrad._src.core.warn import warn_caller


def install() -> str:
    """Installs the lowering rule. Returns why this release of JAX cannot be accelerated; empty if it can."""
    with _lock:
        return _install_once()


_lock = threading.Lock()


@cache
def _install_once() -> str:
    return jax_internals.install(_lower)


@cache
def installed_or_warn() -> bool:
    """Installs the lowering rule at the first call, and warns if that fails."""
    if problem := install():
        warn_caller(f"jaxgrad.accelerate has no effect: {problem}", RuntimeWarning)
    return not problem


def _lower(original: Callable[..., Any], platform: str, context: Any, lhs: Any, rhs: Any, **parameters: Any) -> Any:
    mark = jax_internals.mark(context)
    if mark in (None, marks.EXEMPT) or jax_internals.custom_partitioning_is_refused(context):
        return original(context, lhs, rhs, **parameters)
    implementation = None if mark == marks.AUTOMATIC else mark
    avals = *context.avals_in, *context.avals_out
    plan = plan_equation(parameters, avals, platform, implementation)
    if plan.compute is None:
        return original(context, lhs, rhs, **parameters)
    with marks.marked(marks.EXEMPT):
        return mlir.lower_fun(plan.compute, multiple_results=False)(context, lhs, rhs)
