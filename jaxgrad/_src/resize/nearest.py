"""Nearest-neighbour interpolation of an axis by a whole factor."""

from __future__ import annotations

from functools import partial

import jax
from jax import lax

from jaxgrad._src.resize import blocks

_MOST_SLICES = 8


def enlarge(x: jax.Array, axis: int, factor: int) -> jax.Array:
    """The gradient is the sum of each block: on a CPU of slices, unless they are many, elsewhere a reduction."""
    if factor > _MOST_SLICES:
        return _repeat(x, axis, factor)
    by_slices, by_reduction = (partial(form, axis=axis, factor=factor) for form in (_join, _repeat))
    return lax.platform_dependent(x, cpu=by_slices, default=by_reduction)


def _join(x: jax.Array, axis: int, factor: int) -> jax.Array:
    return blocks.join([x] * factor, axis)


def _repeat(x: jax.Array, axis: int, factor: int) -> jax.Array:
    shape = x.shape
    repeated = lax.broadcast_in_dim(
        x, (*shape[: axis + 1], factor, *shape[axis + 1 :]), [i for i in range(x.ndim + 1) if i != axis + 1]
    )
    return lax.reshape(repeated, (*shape[:axis], shape[axis] * factor, *shape[axis + 1 :]))


def reduce(x: jax.Array, axis: int, factor: int) -> jax.Array:
    """The element at the centre of each block, or after its centre."""
    return lax.slice_in_dim(x, factor // 2, None, factor, axis)
