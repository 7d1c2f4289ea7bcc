"""The calls of pooling that `jaxgrad.tune` measures: value and gradient together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from jaxgrad._src.choice.measured_choices import Measurable
from jaxgrad._src.choice.selection import measurable_implementations
from jaxgrad._src.pool.api import AVG_POOL, MAX_POOL, avg_pool, max_pool
from jaxgrad._src.pool.params import PoolProblem


def measurable(call: PoolProblem, platform: str) -> Measurable:
    """The op and its gradient, on every implementation that supports it."""
    w = call.window
    op, function = (MAX_POOL, max_pool) if call.op == "max_pool" else (AVG_POOL, avg_pool)

    def step(implementation: str) -> Callable[..., Any]:
        def value(x):
            return function(
                x,
                w.shape,
                w.strides,
                w.padding,
                window_dilation=w.dilation,
                feature_axis=-1 if w.channels_last else -1 - w.ndim,
                implementation=implementation,
            )

        def value_and_gradient(x, dy):
            y, pullback = jax.vjp(value, x)
            return y, pullback(dy)

        return value_and_gradient

    functions = {name: step(name) for name in measurable_implementations(op, call, platform)}
    shapes = call.shape, w.y_shape(call.shape)
    return Measurable(functions, [jax.ShapeDtypeStruct(shape, call.dtype) for shape in shapes])
