"""The orders of y: time-major [T, D, B, H] and batch-major [B, T, D, H].

XLA removes the transposes from one order to the other and back, but not where one of them moves an axis of size 1, or
where a reshape that adds one is between them.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


def batch_major_y(y: jax.Array) -> jax.Array:
    T, D, B, H = y.shape
    return y.reshape(T, B, H).swapaxes(0, 1).reshape(B, T, 1, H) if D == 1 else jnp.moveaxis(y, 2, 0)


def time_major_y(y: jax.Array) -> jax.Array:
    B, T, D, H = y.shape
    return y.reshape(B, T, H).swapaxes(0, 1).reshape(T, 1, B, H) if D == 1 else jnp.moveaxis(y, 0, 2)
