"""The orders of y: time-major [T, D, B, H] and batch-major [B, T, D, H].

XLA removes two transposes, from one order to the other and back, but not if they move an axis of size 1. So a D of 1 is
not an axis of the transposes.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


def batch_major_y(y: jax.Array) -> jax.Array:
    """[B, T, D, H], from [T, D, B, H]."""
    T, D, B, H = y.shape
    return y.reshape(T, B, H).swapaxes(0, 1).reshape(B, T, 1, H) if D == 1 else jnp.moveaxis(y, 2, 0)


def time_major_y(y: jax.Array) -> jax.Array:
    """[T, D, B, H], from [B, T, D, H]."""
    B, T, D, H = y.shape
    return y.reshape(B, T, H).swapaxes(0, 1).reshape(T, 1, B, H) if D == 1 else jnp.moveaxis(y, 0, 2)
