"""The calls of the GRU that `jaxgrad.tune` measures: value and gradients together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxgrad._src.core.selection import measurable_implementations
from jaxgrad._src.core.tuning import Measurable
from jaxgrad._src.gru.api import OP, gru
from jaxgrad._src.gru.params import GruProblem

MANY_STEPS = 64  # a call of so many steps takes longer than the start of a program


def measurable(call: GruProblem, platform: str) -> Measurable:
    """The op and the gradients of x, w, r, b and initial_h, on every implementation that supports it."""
    p = call
    shapes = (p.T, p.B, p.I), (p.D, 3 * p.H, p.I), (p.D, 3 * p.H, p.H), (p.D, 6 * p.H), (p.D, p.B, p.H)

    def step(implementation: str) -> Callable[..., Any]:
        def value(x, w, r, b, initial_h):
            return gru(
                x,
                w,
                r,
                b,
                initial_h=initial_h,
                direction="bidirectional" if p.D == 2 else "forward",
                linear_before_reset=p.linear_before_reset,
                clip=p.clip,
                implementation=implementation,
            )

        def value_and_gradients(*arrays):
            y, pullback = jax.vjp(value, *arrays)
            return y, pullback(jax.tree.map(jnp.ones_like, y))

        return jax.vmap(value_and_gradients) if p.groups > 1 else value_and_gradients

    names = measurable_implementations(OP, call, platform)
    groups = (p.groups,) if p.groups > 1 else ()
    operands = [jax.ShapeDtypeStruct((*groups, *shape), p.dtype) for shape in shapes]
    return Measurable({name: step(name) for name in names}, operands, one_call_a_program=p.T >= MANY_STEPS)
