"""The peer in JAX: a GRU on `lax.scan`, differentiated by `jax.grad`."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


def scan_gru(
    x: jax.Array,
    w: jax.Array,
    r: jax.Array,
    b: jax.Array,
    initial_h: jax.Array,
    sequence_lens: jax.Array | None = None,
    reset: jax.Array | None = None,
    *,
    bidirectional: bool,
    linear_before_reset: bool,
) -> tuple[jax.Array, jax.Array]:
    """`jaxgrad.gru` with the same shapes, with the input product of all steps before the loop."""
    H = r.shape[2]

    def one_direction(d: int) -> tuple[jax.Array, jax.Array]:
        input_bias, recurrent_bias = b[d, : 3 * H], b[d, 3 * H :]
        inputs = x @ w[d].T + input_bias  # [T, B, 3H]

        def step(before: jax.Array, t: Any) -> tuple[jax.Array, jax.Array]:
            inputs_t, reset_t, within_t = t
            h = before if reset_t is None else jnp.where(reset_t[:, None], 0, before)
            in_z, in_r, in_n = jnp.split(inputs_t, 3, axis=-1)
            if linear_before_reset:
                re_z, re_r, re_n = jnp.split(h @ r[d].T + recurrent_bias, 3, axis=-1)
                z, reset = jax.nn.sigmoid(in_z + re_z), jax.nn.sigmoid(in_r + re_r)
                n = jnp.tanh(in_n + reset * re_n)
            else:
                re_z, re_r = jnp.split(h @ r[d, : 2 * H].T + recurrent_bias[: 2 * H], 2, axis=-1)
                z, reset = jax.nn.sigmoid(in_z + re_z), jax.nn.sigmoid(in_r + re_r)
                n = jnp.tanh(in_n + (reset * h) @ r[d, 2 * H :].T + recurrent_bias[2 * H :])
            h = (1 - z) * n + z * h
            if within_t is None:
                return h, h
            return jnp.where(within_t[:, None], h, before), jnp.where(within_t[:, None], h, 0)

        within = None if sequence_lens is None else jnp.arange(x.shape[0])[:, None] < sequence_lens
        last, states = lax.scan(step, initial_h[d], (inputs, reset, within), reverse=d == 1)
        return states, last

    states, lasts = zip(*(one_direction(d) for d in range(1 + bidirectional)), strict=True)
    return jnp.stack(states, 1), jnp.stack(lasts)
