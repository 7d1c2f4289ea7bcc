"""Symbolic zeros in `jax.custom_vjp` rules: which arguments are differentiated, and which cotangents are zero."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class NeedsGrad:
    """Which arguments need a gradient: a residual that is known while tracing."""

    flags: tuple[bool, ...]


def values_and_needs_grad(*primals: Any) -> tuple[tuple[Any, ...], NeedsGrad]:
    """Returns the values of a forward rule's arguments, which may be None, and which of them need a gradient."""
    values = tuple(None if p is None else p.value for p in primals)
    return values, NeedsGrad(tuple(p is not None and p.perturbed for p in primals))


def none_if_zero(cotangent: Any) -> Any:
    """Returns a cotangent, or None if it is zero because nothing depends on the result."""
    return None if isinstance(cotangent, jax.custom_derivatives.SymbolicZero) else cotangent


def instantiate_zeros(cotangent: Any) -> Any:
    """Returns a cotangent as an array. None, the cotangent of a result that is None, stays None."""
    is_zero = isinstance(cotangent, jax.custom_derivatives.SymbolicZero)
    return jnp.zeros(cotangent.shape, cotangent.dtype) if is_zero else cotangent
