"""Which axes are resized by a whole factor, and how."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.image import ResizeMethod

from jaxgrad._src.resize import linear, nearest

Rule = Callable[..., jax.Array]  # of an array and an axis

# Of linear interpolation, which adds the gradients of all results of a block. Measured on a CPU: twice as fast as the
# matrix products of `jax.image.resize` for 8, slower for 16.
_LARGEST_FACTOR = 8


def whole_factor_rule(old: Any, new: Any, method: ResizeMethod, antialias: bool) -> Rule | None:
    """Returns how an axis of size `old` gets the size `new`; None where that is left to `jax.image.resize`."""
    grows, shrinks = _whole_quotient(new, old), _whole_quotient(old, new)
    if method is ResizeMethod.NEAREST:
        rule: Rule = nearest.enlarge if grows else nearest.reduce
    elif method is ResizeMethod.LINEAR and grows and old == 1:
        rule = nearest.enlarge
    elif method is ResizeMethod.LINEAR and max(grows, shrinks) <= _LARGEST_FACTOR:
        rule = linear.enlarge if grows else linear.reduce_antialiased if antialias else linear.reduce
    else:
        return None
    return partial(rule, factor=grows or shrinks) if grows or shrinks else None


def _whole_quotient(large: Any, small: Any) -> int:
    """Returns the quotient of two sizes if it is a whole number above 1, else 0. Sizes may be symbolic."""
    quotient = 0 if small == 0 else large // small
    return quotient if isinstance(quotient, int) and quotient > 1 and quotient * small == large else 0


def apply(rules: Mapping[int, Rule], x: jax.Array, method: ResizeMethod) -> jax.Array:
    """Resizes the axes one after the other, the last one first. Sums are float32 for 16-bit images.

    Sums along one axis are kept in memory on a CPU, where XLA would compute them again for each sum along the next one.
    On GPUs reading x again is faster than writing and reading a larger array.
    """
    dtype = x.dtype
    if jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 32:
        x = x.astype(jnp.float32)
    for i, axis in enumerate(sorted(rules, reverse=True)):
        if i and method is ResizeMethod.LINEAR:
            x = lax.platform_dependent(x, cpu=lax.optimization_barrier, default=lambda x: x)
        x = rules[axis](x, axis)
    return x if x.dtype == dtype else x.astype(dtype)
