"""Nearest-neighbour interpolation of an axis by a whole factor."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from jaxgrad._src.resize import blocks

_MOST_SLICES = 8


def enlarge(x: jax.Array, axis: int, factor: int) -> jax.Array:
    """The gradient is the sum of each block: of slices, which XLA fuses, or a reduction where they are many."""
    if factor > _MOST_SLICES:
        return jnp.repeat(x, factor, axis)
    return blocks.join([x] * factor, axis)


def reduce(x: jax.Array, axis: int, factor: int) -> jax.Array:
    """The element at the centre of each block, or after its centre."""
    return lax.slice_in_dim(x, factor // 2, None, factor, axis)
