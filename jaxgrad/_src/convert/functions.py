"""Which functions the gates of a layer apply."""

from __future__ import annotations

import contextlib
import weakref
from typing import Any, Literal

import jax
import jax.numpy as jnp

Activation = Literal["sigmoid", "tanh"]

# The primitive of JAX that is an activation.
PRIMITIVES: dict[Activation, str] = {"sigmoid": "logistic", "tanh": "tanh"}

# The primitives of functions that were traced, because an eager call of a layer asks each time.
_traced: weakref.WeakKeyDictionary[Any, list[str | None]] = weakref.WeakKeyDictionary()


def computes(function: Any, activation: Activation) -> bool | None:
    """Whether a function is the primitive of JAX for an activation. None if JAX cannot trace it.

    The function is traced, because `copy.deepcopy` and cloudpickle make other objects, without a name, of functions
    that are jitted, such as `jax.nn.sigmoid`. It is traced in two dtypes, because it may round.
    """
    try:
        found = _traced.get(function)
    except TypeError:  # no hash, or no weak references
        found = None
    if found is None:
        try:
            found = [_primitive_of(function, dtype) for dtype in (jnp.float32, jnp.bfloat16)]
        except Exception:  # a function of another library raises any error
            return None
        with contextlib.suppress(TypeError):
            _traced[function] = found
    return found == [PRIMITIVES[activation]] * 2


def _primitive_of(function: Any, dtype: Any) -> str | None:
    """The name of the only primitive of a function of one array, or None."""
    jaxpr = jax.make_jaxpr(function)(jax.ShapeDtypeStruct((2,), dtype)).jaxpr
    while len(jaxpr.eqns) == 1 and jaxpr.eqns[0].invars == jaxpr.invars and jaxpr.eqns[0].outvars == jaxpr.outvars:
        (equation,) = jaxpr.eqns
        if equation.primitive.name not in ("jit", "pjit"):
            return equation.primitive.name if equation.params.get("accuracy") is None else None
        jaxpr = equation.params["jaxpr"].jaxpr
    return None
