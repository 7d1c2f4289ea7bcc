"""What JAX tells a rule of `custom_vjp` that asks for symbolic zeros: which arguments are differentiated, and which
results are."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Wanted:
    """Which of several arrays are differentiated: a residual that is known while tracing."""

    flags: tuple[bool, ...]


def values_and_wanted(*primals: Any) -> tuple[tuple[Any, ...], Wanted]:
    """The arguments of a forward rule, some of which may be None, and which of them are differentiated."""
    values = tuple(None if p is None else p.value for p in primals)
    return values, Wanted(tuple(p is not None and p.perturbed for p in primals))


def known(cotangent: Any) -> Any:
    """The cotangent of a result, or None where it is zero because nothing depends on the result."""
    return None if isinstance(cotangent, jax.custom_derivatives.SymbolicZero) else cotangent


def instantiated(cotangent: Any) -> Any:
    """The cotangent of a result as an array; None stays None, that of a result which is None."""
    is_zero = isinstance(cotangent, jax.custom_derivatives.SymbolicZero)
    return jnp.zeros(cotangent.shape, cotangent.dtype) if is_zero else cotangent
