"""Linear interpolation of an axis by a whole factor: weighted sums of an element and its neighbours.

Weights that would fall outside the array are left out, and the others are divided by their sum.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax

from jaxgrad._src.resize import blocks


def enlarge(x: jax.Array, axis: int, factor: int) -> jax.Array:
    """Each element becomes a block, whose results lie up to half an element before and after it."""
    distances = [(2 * i + 1 - factor) / (2 * factor) for i in range(factor)]
    return blocks.join([_interpolate(x, axis, distance) for distance in distances], axis)


def _interpolate(x: jax.Array, axis: int, distance: float) -> jax.Array:
    if distance == 0:
        return x
    side, weight = (-1 if distance < 0 else 1), abs(distance)
    own = blocks.at_edge(x, axis, side, 1.0, 1 - weight)
    return own * x + weight * blocks.neighbour(x, axis, side)


def reduce(x: jax.Array, axis: int, factor: int) -> jax.Array:
    """The mean of the two elements at the centre of each block, or the one there."""
    phases, half = blocks.split(x, axis, factor), factor // 2
    return phases[half] if factor % 2 else 0.5 * phases[half - 1] + 0.5 * phases[half]


def reduce_antialiased(x: jax.Array, axis: int, factor: int) -> jax.Array:
    """The sum of each block and of the halves of blocks beside it, weighted by a triangle around its centre."""
    phases, half = blocks.split(x, axis, factor), factor // 2
    before, inside, after = (
        [(1 - abs(i - (factor - 1) / 2) / factor) / factor for i in indices]
        for indices in (range(-half, 0), range(factor), range(factor, factor + half))
    )
    y = _weighted_sum(inside, phases)
    y += blocks.neighbour(_weighted_sum(before, phases[-half:]), axis, -1)
    y += blocks.neighbour(_weighted_sum(after, phases[:half]), axis, 1)
    left_out = sum(blocks.at_edge(y, axis, side, sum(before), 0.0) for side in (-1, 1))
    return y * (1 / (1 - left_out))


def _weighted_sum(weights: Sequence[float], arrays: Sequence[jax.Array]) -> jax.Array:
    return sum(weight * array for weight, array in zip(weights, arrays, strict=True))  # type: ignore[return-value]
