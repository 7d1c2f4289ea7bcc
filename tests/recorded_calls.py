"""The calls of a function that `jaxgrad.tune` measures, and random arrays for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxgrad
from jaxgrad._src.choice.measured_choices import RecordedCall, Recorder

_RNG = np.random.default_rng(0)


def random_array(*shape: int) -> jax.Array:
    return jnp.asarray(_RNG.normal(size=shape), jnp.float32)


def recorded_calls(function: Callable[..., Any], *args: Any) -> dict[str, RecordedCall]:
    """The calls by their texts."""
    recorder = Recorder()
    with jaxgrad.config.override(tuning=recorder):
        jax.jit(function).lower(*args)
    return recorder.calls
