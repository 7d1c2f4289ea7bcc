"""The calls of the GRU that `jaxgrad.tune` measures: value and gradients together."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxgrad._src.choice.measured_choices import Measurable
from jaxgrad._src.choice.selection import measurable_implementations
from jaxgrad._src.gru.api import OP, gru
from jaxgrad._src.gru.params import GruProblem

MANY_STEPS = 64  # a call of so many steps takes longer than the start of a program
_RESETS = 0.01  # of all steps


def measurable(call: GruProblem, platform: str) -> Measurable:
    """The op and its gradients, on every implementation that supports it.

    The gradients are those of x, w, r, b, initial_h and, where the call has it, reset_h. The op has `sequence_lens` and
    `reset` where the call has them, and the precision of the call.
    """
    p = call
    state = p.D, p.B, p.H
    shapes = [(p.T, p.B, p.I), (p.D, 3 * p.H, p.I), (p.D, 3 * p.H, p.H), (p.D, 6 * p.H), state]
    shapes += [state] if p.has_reset_h else []
    groups = (p.groups,) if p.groups > 1 else ()
    floating = [jax.ShapeDtypeStruct((*groups, *shape), p.dtype) for shape in shapes]
    lengths_and_resets = _lengths_and_resets(p, groups)

    def step(implementation: str) -> Callable[..., Any]:
        def value(others, x, w, r, b, initial_h, reset_h=None):
            with jax.default_matmul_precision(p.precision):
                return gru(
                    x,
                    w,
                    r,
                    b,
                    initial_h=initial_h,
                    reset_h=reset_h,
                    direction="bidirectional" if p.D == 2 else "forward",
                    linear_before_reset=p.linear_before_reset,
                    clip=p.clip,
                    implementation=implementation,
                    **others,
                )

        def value_and_gradients(*arrays):
            others = dict(zip(lengths_and_resets, arrays[len(floating) :], strict=True))
            y, pullback = jax.vjp(partial(value, others), *arrays[: len(floating)])
            return y, pullback(jax.tree.map(jnp.ones_like, y))

        return jax.vmap(value_and_gradients) if p.groups > 1 else value_and_gradients

    functions = {name: step(name) for name in measurable_implementations(OP, call, platform)}
    operands = [*floating, *lengths_and_resets.values()]
    return Measurable(functions, operands, one_call_a_program=p.T >= MANY_STEPS)


def _lengths_and_resets(p: GruProblem, groups: tuple[int, ...]) -> dict[str, np.ndarray]:
    """The lengths, from T / 2 to T, and the resets, one in a hundred steps, by argument; without those not given."""
    rng, found = np.random.default_rng(0), {}
    if p.has_lengths:
        found["sequence_lens"] = rng.integers(p.T // 2, p.T + 1, (*groups, p.B), np.int32)
    if p.has_resets:
        found["reset"] = rng.random((*groups, p.T, p.B), np.float32) < _RESETS
    return found
