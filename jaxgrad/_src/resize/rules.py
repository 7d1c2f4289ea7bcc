"""Which axes are resized by a whole factor, and how."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.image import ResizeMethod

from jaxgrad._src.resize import linear, nearest


class Rule(NamedTuple):
    """How an axis is resized: by a function of the array, the axis and the factor."""

    function: Callable[[jax.Array, int, int], jax.Array]
    factor: int
    grows: bool


# Of linear interpolation, whose programs grow with the factor. Measured on a CPU: faster than the matrix products of
# `jax.image.resize` up to 8, slower for 16.
_LARGEST_FACTOR = 8


def whole_factor_rule(old: Any, new: Any, method: ResizeMethod, antialias: bool) -> Rule | None:
    """Returns how an axis of size `old` gets the size `new`; None where that is left to `jax.image.resize`."""
    grows, shrinks = _whole_quotient(new, old), _whole_quotient(old, new)
    if not grows and not shrinks:
        return None
    if method is ResizeMethod.NEAREST:
        function = nearest.enlarge if grows else nearest.reduce
    elif method is ResizeMethod.LINEAR and grows and old == 1:
        function = nearest.enlarge
    elif method is ResizeMethod.LINEAR and max(grows, shrinks) <= _LARGEST_FACTOR:
        function = linear.enlarge if grows else linear.reduce_antialiased if antialias else linear.reduce
    else:
        return None
    return Rule(function, max(grows, shrinks), grows > 0)


def _whole_quotient(large: Any, small: Any) -> int:
    """Returns the quotient of two sizes if it is a whole number above 1, else 0. Sizes may be symbolic."""
    quotient = 0 if small == 0 else large // small
    return quotient if isinstance(quotient, int) and quotient > 1 and quotient * small == large else 0


def apply(rules: Mapping[int, Rule], x: jax.Array, method: ResizeMethod) -> jax.Array:
    """Resizes the axes one after the other. Sums are float32 for 16-bit images.

    Sums along one axis are kept in memory on a CPU, where XLA would compute them again for each sum along the next one.
    On GPUs XLA estimates whether to compute sums again is faster than to write and read them.
    """
    dtype = x.dtype
    if jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 32:
        x = x.astype(jnp.float32)
    for i, axis in enumerate(_order(rules)):
        if i and method is ResizeMethod.LINEAR:
            x = lax.platform_dependent(x, cpu=lax.optimization_barrier, default=lambda x: x)
        function, factor, _ = rules[axis]
        x = function(x, axis, factor)
    return x if x.dtype == dtype else x.astype(dtype)


def _order(rules: Mapping[int, Rule]) -> list[int]:
    """The last axes, whose slices are not contiguous, where the array is small: after it shrinks, before it grows."""
    grows = {axis: rules[axis].grows for axis in sorted(rules)}
    return [axis for axis in grows if not grows[axis]] + [axis for axis in reversed(grows) if grows[axis]]
