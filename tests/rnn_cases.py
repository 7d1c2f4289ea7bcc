"""Calls of `RNN` in flax, linen and nnx, which have the same arguments."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from converted_gru import B, H, I, T, normal

LENGTHS = np.array([4, T, 1])
# Arguments of the call. `Bidirectional` calls its second layer with `reverse`, `keep_order` and the lengths.
CALLS = {
    "batch major": {},
    "time major": {"time_major": True, "return_carry": True, "initial_carry": normal(B, H)},
    "lengths": {"seq_lengths": LENGTHS, "return_carry": True},
    "reverse": {"reverse": True, "return_carry": True},
    "reverse, lengths": {"reverse": True, "seq_lengths": LENGTHS, "return_carry": True, "time_major": True},
}


def inputs_of(call: dict[str, Any]) -> jax.Array:
    return jnp.asarray(normal(*((T, B) if call.get("time_major") else (B, T)), I))


def program_of(function: Any, *args: Any) -> str:
    return str(jax.make_jaxpr(function)(*args))


def values_and_gradients(run: Any, *args: Any) -> Any:
    """The results and the gradients of all floating-point arguments, from one compiled program."""

    def both(*args: Any) -> Any:
        results, pullback = jax.vjp(run, *args)
        cotangents = jax.tree.map(lambda a: jnp.cos(jnp.arange(a.size, dtype=a.dtype)).reshape(a.shape), results)
        return results, pullback(cotangents)

    return jax.jit(both)(*args)
