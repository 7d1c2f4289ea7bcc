"""Pooling on XLA.

The derivatives of a maximum read the element that XLA's `select_and_scatter` selects in each window: the first one in
row-major order, unless a later one is larger, or one of the two is NaN. JAX pads x with -infinity before, so that
padding may be selected where all elements are -infinity, or one is NaN; it then has the derivative.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxgrad._src.pool.params import PoolParams, Window
from jaxgrad._src.run.mesh_axes import pvary_to_match


def max_forward(params: PoolParams, x: jax.Array) -> jax.Array:
    """Returns the maximum of each window."""
    return _reduce_window(params.window, x, x.dtype.type(-jnp.inf), lax.max)


def max_input_gradient(params: PoolParams, x: jax.Array, dy: jax.Array) -> jax.Array:
    """Returns the sums of dy over the windows that select each element of x."""
    if all(dilation == 1 for dilation in params.window.dilation):
        return jax.vjp(partial(max_forward, params), x)[1](dy)[0]
    return _gradient_by_tap(params.window, x, dy)  # JAX has no such gradient


def max_tangent(params: PoolParams, x: jax.Array, dx: jax.Array) -> jax.Array:
    """Returns the element of dx that each window selects.

    Of equal elements, JAX's tangent is that of another one than its gradient goes to. This is the transpose of the
    gradient.
    """
    window = params.window
    every = partial(window.of_all_axes, ndim=x.ndim)
    pads = [(low, high, 0) for low, high in every(window.padding, (0, 0))]
    zero = dx.dtype.type(0)
    padded, padded_dx = lax.pad(x, x.dtype.type(-jnp.inf), pads), lax.pad(dx, zero, pads)

    def select(first: tuple[jax.Array, ...], second: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        keeps = (first[0] >= second[0]) & first[2] | ~second[2]
        return tuple(lax.select(keeps, *pair) for pair in zip(first, second, strict=True))

    return lax.reduce_window(
        (padded, padded_dx, jnp.ones(padded.shape, bool)),
        (x.dtype.type(0), zero, np.False_),  # the last one marks what is no element
        select,
        every(window.shape, 1),
        every(window.strides, 1),
        every(((0, 0),) * window.ndim, (0, 0)),
        window_dilation=every(window.dilation, 1),
    )[1]


def sum_forward(params: PoolParams, x: jax.Array) -> jax.Array:
    """Returns the sum of each window, divided."""
    return _sum(params.window, x, params.divisor)


def sum_input_gradient(params: PoolParams, dy: jax.Array) -> jax.Array:
    """Returns the sums of dy over the windows that each element is in, divided.

    They are sums of dilated dy with the distance 1 between windows.
    """
    window, config = params.window, []
    axes = zip(params.spatial, window.spatial(dy.shape), window.shape, window.dilation, strict=True)
    for (x_size, y_size, size, gap), stride, (low, _) in zip(axes, window.strides, window.padding, strict=True):
        reach, dilated = (size - 1) * gap, jax.core.max_dim(0, (y_size - 1) * stride + 1)
        config.append((reach - low, x_size + low - dilated, stride - 1))
    padded = lax.pad(dy, dy.dtype.type(0), window.of_all_axes(tuple(config), (0, 0, 0), dy.ndim))
    no_padding, ones = ((0, 0),) * window.ndim, (1,) * window.ndim
    return _sum(dataclasses.replace(window, padding=no_padding, strides=ones), padded, params.divisor)


def _sum(window: Window, x: jax.Array, divisor: int) -> jax.Array:
    """Sums of 16-bit elements are float32."""
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    return (_reduce_window(window, wide, wide.dtype.type(0), lax.add) / divisor).astype(x.dtype)


def _reduce_window(window: Window, x: jax.Array, start: Any, operation: Callable[..., jax.Array]) -> jax.Array:
    every = partial(window.of_all_axes, ndim=x.ndim)
    return lax.reduce_window(
        x,
        start,
        operation,
        every(window.shape, 1),
        every(window.strides, 1),
        every(window.padding, (0, 0)),
        window_dilation=every(window.dilation, 1),
    )


def _gradient_by_tap(window: Window, x: jax.Array, dy: jax.Array) -> jax.Array:
    """The gradient of dilated windows: one loop over the elements of a window selects, and one adds."""
    every = partial(window.of_all_axes, ndim=x.ndim)
    pads = [(low, high, 0) for low, high in every(window.padding, (0, 0))]
    padded = lax.pad(x, x.dtype.type(-jnp.inf), pads)
    strides = every(window.strides, 1)
    reaches = [(size - 1) * stride + 1 for size, stride in zip(dy.shape, strides, strict=True)]
    taps = math.prod(window.shape)

    def start(tap: jax.Array) -> tuple[Any, ...]:
        """The element of the first window with this number."""
        index = jnp.unravel_index(tap, window.shape)
        return every(tuple(i * dilation for i, dilation in zip(index, window.dilation, strict=True)), 0)

    def select(tap: jax.Array, best: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        found, selected = best
        value = lax.slice(lax.dynamic_slice(padded, start(tap), reaches), (0,) * x.ndim, reaches, strides)
        keeps = (found >= value) & (tap > 0)
        return jnp.where(keeps, found, value), jnp.where(keeps, selected, tap)

    def add(i: jax.Array, dx: jax.Array) -> jax.Array:
        tap = taps - 1 - i  # the first window that has an element has it last
        terms = jnp.where(selected == tap, dy, 0)
        spread = lax.pad(terms, terms.dtype.type(0), [(0, 0, stride - 1) for stride in strides])
        sums = lax.dynamic_slice(dx, start(tap), reaches) + spread
        return lax.dynamic_update_slice(dx, sums, start(tap))

    if 0 in dy.shape:
        return jnp.zeros_like(x)
    none, zeros, _, _ = pvary_to_match(jnp.zeros_like(dy, jnp.int32), jnp.zeros_like(padded), padded, dy)
    _, selected = lax.fori_loop(0, taps, select, (pvary_to_match(jnp.zeros_like(dy), dy)[0], none))
    dx = lax.fori_loop(0, taps, add, zeros)
    return lax.slice(dx, [low for low, _, _ in pads], [low + n for (low, _, _), n in zip(pads, x.shape, strict=True)])
