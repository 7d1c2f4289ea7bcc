"""Sums of two arrays of one shape, as XLA computes them fastest."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


def two_sums(first: jax.Array, second: jax.Array, axes: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
    """Returns the sums of two arrays of one shape, which XLA computes inside the reduction."""
    if not axes:
        return first, second

    def separately(first: jax.Array, second: jax.Array) -> tuple[jax.Array, jax.Array]:
        return first.sum(axes), second.sum(axes)

    # On a GPU a reduction launches two kernels: one reduction of both arrays launches two instead of four. On a CPU XLA
    # does not vectorize a reduction of two arrays.
    return lax.platform_dependent(first, second, cuda=partial(two_sums_together, axes=axes), default=separately)


def two_sums_together(first: jax.Array, second: jax.Array, axes: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
    """Returns both sums by one reduction, in two stages where that occupies more of a GPU."""

    def add(a: tuple[jax.Array, ...], b: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        return tuple(map(lax.add, a, b))

    zeros = (jnp.zeros((), first.dtype),) * 2
    parts = _parts(first.shape, axes)
    if parts > 1:
        first, second = (a.reshape(parts, math.prod(a.shape[:-1]) // parts, a.shape[-1]) for a in (first, second))
        first, second = lax.optimization_barrier(lax.reduce((first, second), zeros, add, (1,)))
        axes = (0,)
    return lax.reduce((first, second), zeros, add, axes)


def _parts(shape: tuple[Any, ...], axes: tuple[int, ...]) -> int:
    """Returns the number of parts in which the rows of a small array are summed. A row is one element of each channel.

    For small arrays XLA assigns all rows of a group of channels to one thread block, and parts are faster on a GPU. For
    many rows they are slower, because XLA then writes the terms of the sums to memory.
    """
    rows = [shape[axis] for axis in axes]
    if axes != tuple(range(len(shape) - 1)) or not all(isinstance(size, int) for size in rows):
        return 1  # the channels are not the last dimension, or sizes are symbolic
    count = math.prod(rows)
    divisors = [d for d in range(16, 65) if count % d == 0]
    return min(divisors, key=lambda d: abs(d - 32), default=1) if 0 < count <= _MAX_ROWS_IN_PARTS else 1


_MAX_ROWS_IN_PARTS = 1 << 13
