"""Parts of the GRU's formulas on XLA: dtypes, lengths, resets, and gates with clipping."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from jaxgrad._src.gru.params import GruParams

_CLIPPED = 2.0  # saved in place of a gate whose pre-activation was clipped


def compute_dtype(array: jax.Array) -> jnp.dtype:
    return jnp.dtype(jnp.float32) if array.dtype.itemsize == 2 else array.dtype


def dot(params: GruParams, a: jax.Array, b: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Returns a[..., k] b[k, n], with operands in the storage dtype and the sum in `dtype`."""
    dims = (((a.ndim - 1,), (0,)), ((), ()))
    return lax.dot_general(a.astype(b.dtype), b, dims, params.precision, dtype)


def valid_steps(sequence_lens: jax.Array | None, T: int) -> jax.Array | None:
    """Returns [T, B, 1]: whether a step lies within the length of its row. Lengths are clamped to [0, T]."""
    return (
        None
        if sequence_lens is None
        else (jnp.arange(T, dtype=sequence_lens.dtype)[:, None] < sequence_lens[None, :])[..., None]
    )


def keep_valid(valid: jax.Array | None, array: jax.Array) -> jax.Array:
    """Returns the array with zeros past the length of each row, even where it holds NaN."""
    return array if valid is None else jnp.where(valid, array, 0)


def valid_resets(reset: jax.Array | None, valid: jax.Array | None) -> jax.Array | None:
    """Returns [T, B, 1]: whether the state before a step is replaced. No state is past the length of a row."""
    if reset is None:
        return None
    return reset[..., None] if valid is None else reset[..., None] & valid


def state_of(states: jax.Array | None, d: int, shape: tuple[int, int], dtype: jnp.dtype) -> jax.Array:
    """Returns the states [B, H] of one direction, of `states` [D, B, H] or zeros."""
    return jnp.zeros(shape, dtype) if states is None else states[d].astype(dtype)


def replace_reset(reset: jax.Array | None, restart: jax.Array, h: jax.Array) -> jax.Array:
    """Returns the states before one step or all steps, replaced by `restart` where `reset` is true."""
    return h if reset is None else jnp.where(reset, restart, h)


def clip_gate(gate: jax.Array, clip: float | None) -> jax.Array:
    return gate if clip is None else jnp.clip(gate, -clip, clip)


def mark_clipped(gate: jax.Array, before: jax.Array, clip: float | None) -> jax.Array:
    if clip is None:
        return gate
    return jnp.where(before >= clip, _CLIPPED, jnp.where(before <= -clip, -_CLIPPED, gate))


def restore_gate(
    gates: jax.Array,
    clip: float | None,
    activation: Callable[[jax.Array], jax.Array],
    derivative: Callable[[jax.Array], jax.Array],
) -> tuple[jax.Array, jax.Array]:
    """Returns a saved gate and the derivative of its activation, which is zero where the gate was clipped."""
    if clip is None:
        return gates, derivative(gates)
    clipped = jnp.abs(gates) > 1.5
    value = jnp.where(clipped, activation(jnp.sign(gates) * clip), gates)
    return value, jnp.where(clipped, 0, derivative(value))


def sigmoid_derivative(s: jax.Array) -> jax.Array:
    return s * (1 - s)


def tanh_derivative(t: jax.Array) -> jax.Array:
    return 1 - t * t


def scans_in_reverse(direction: str) -> tuple[bool, ...]:
    return {"forward": (False,), "reverse": (True,), "bidirectional": (False, True)}[direction]
