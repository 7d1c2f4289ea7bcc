"""Which functions the gates of a layer apply."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp


def computes(function: Any, primitive: str) -> bool | None:
    """Whether a function is one elementwise primitive of JAX, such as "tanh". None if JAX cannot trace it.

    The function is traced, because `copy.deepcopy` and cloudpickle make other objects, without a name, of functions
    that are jitted, such as `jax.nn.sigmoid`. It is traced in two dtypes, because it may round.
    """
    try:
        found = [_primitive_of(function, dtype) for dtype in (jnp.float32, jnp.bfloat16)]
    except Exception:  # a function of another library raises any error
        return None
    return found == [primitive] * 2


def _primitive_of(function: Any, dtype: Any) -> str | None:
    """The name of the only primitive of a function of one array, or None."""
    jaxpr = jax.make_jaxpr(function)(jax.ShapeDtypeStruct((2,), dtype)).jaxpr
    while len(jaxpr.eqns) == 1 and jaxpr.eqns[0].invars == jaxpr.invars and jaxpr.eqns[0].outvars == jaxpr.outvars:
        (equation,) = jaxpr.eqns
        if equation.primitive.name not in ("jit", "pjit"):
            return equation.primitive.name if equation.params.get("accuracy") is None else None
        jaxpr = equation.params["jaxpr"].jaxpr
    return None
