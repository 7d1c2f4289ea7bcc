"""The argument `activation=` of the ops: a name, or the function of `jax.nn` that it stands for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from jaxgrad._src.core.checks import check_choice

Activation = str | Callable[[jax.Array], jax.Array] | None

# flax and haiku export the same functions. The default of `jax.nn.gelu` is the approximation by tanh.
FUNCTIONS = {"relu": jax.nn.relu, "silu": jax.nn.silu, "gelu": jax.nn.gelu}


def activation_name(op: str, activation: Any, choices: Sequence[str | None]) -> str | None:
    """Returns the name of an activation, which must be one of `choices` or a function with such a name."""
    name = next((name for name, function in FUNCTIONS.items() if function is activation), activation)
    check_choice(op, "activation", name, choices)
    return name
