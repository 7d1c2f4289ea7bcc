"""Swaps the input and output features of grouped weights."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp


def swap_features(w: jax.Array, rhs_spec: Sequence[int], groups: int) -> jax.Array:
    """Swaps input and output features within each group, in the layout of w: [G O, I, ...] becomes [G I, O, ...]."""
    canonical = jnp.transpose(w, rhs_spec)
    out, inn, *window = canonical.shape
    grouped = canonical.reshape(groups, out // groups, inn, *window)
    swapped = jnp.swapaxes(grouped, 1, 2).reshape(groups * inn, out // groups, *window)
    return jnp.transpose(swapped, [tuple(rhs_spec).index(axis) for axis in range(w.ndim)])
