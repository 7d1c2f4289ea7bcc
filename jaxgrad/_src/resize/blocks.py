"""An axis as blocks of equal size: the elements at one position of every block are an array, a phase."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax


def split(x: jax.Array, axis: int, factor: int) -> list[jax.Array]:
    """The phases of blocks of `factor` elements."""
    shape = x.shape
    blocks = lax.reshape(x, (*shape[:axis], shape[axis] // factor, factor, *shape[axis + 1 :]))
    # Its transpose is a concatenation, which XLA fuses better than the sum of padded arrays for slices.
    return [lax.squeeze(phase, (axis + 1,)) for phase in lax.split(blocks, (1,) * factor, axis + 1)]


def join(phases: Sequence[jax.Array], axis: int) -> jax.Array:
    """The array with these phases. The gradient of each is a slice."""
    blocks = lax.concatenate([lax.expand_dims(phase, (axis + 1,)) for phase in phases], axis + 1)
    shape = phases[0].shape
    return lax.reshape(blocks, (*shape[:axis], shape[axis] * len(phases), *shape[axis + 1 :]))


def neighbour(x: jax.Array, axis: int, side: int) -> jax.Array:
    """At each index the element before it, for side -1, or after it, for 1; zero where there is none."""
    config = [(0, 0, 0)] * x.ndim
    config[axis] = (-side, side, 0)
    return lax.pad(x, jnp.zeros((), x.dtype), config)


def at_edge(x: jax.Array, axis: int, side: int, edge: float, elsewhere: float) -> jax.Array:
    """A factor of x: `edge` at the index that has no neighbour on this side, `elsewhere` at the others."""
    others = jnp.full((x.shape[axis] - 1,), elsewhere, x.dtype)
    pair = (1, 0, 0) if side < 0 else (0, 1, 0)
    factor = lax.pad(others, jnp.asarray(edge, x.dtype), [pair])
    return lax.expand_dims(factor, [other for other in range(x.ndim) if other != axis])
