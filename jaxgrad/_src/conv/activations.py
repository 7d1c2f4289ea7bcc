"""The activations that XLA applies to the result of a convolution. A kernel may fuse relu instead."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp

_ON_XLA: dict[str | None, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu": partial(jax.nn.gelu, approximate=True),
}
ACTIVATIONS: tuple[str | None, ...] = (None, "relu", *_ON_XLA)


def check_activation(name: str, activation: str | None, dtype: jnp.dtype) -> None:
    """Raises TypeError where `jax.nn` would return another dtype than that of the convolution."""
    if activation in _ON_XLA and not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(f"{name}: activation={activation!r} needs a floating-point result, got {dtype.name}")


def activate(y: jax.Array, activation: str | None) -> jax.Array:
    """Applies silu or gelu, whose derivatives are computed from y: y is the only residual. Relu is part of the pass."""
    if activation not in _ON_XLA:
        return y
    return jax.checkpoint(_ON_XLA[activation], prevent_cse=False)(y)
