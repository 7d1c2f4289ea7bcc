"""The layers of a `jaxgrad.nn.GRU` in plain JAX, as a `jax.lax.scan` over the steps: the examples compare with it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

import jaxgrad.nn
from jaxgrad.convert import GRUWeights


def run(
    gru: jaxgrad.nn.GRU, x: jax.Array, hx: jax.Array, *, reset: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """Computes `gru(x, hx, reset=reset)`, for layers of one direction with biases.

    Args:
      gru: L layers of H units.
      x: [T, B, I].
      hx: [L, B, H], the states before the first step.
      reset: [T, B], bool: zeros replace the states before these steps. None for no resets.

    Returns:
      The outputs [T, B, H] and the last states [L, B, H].
    """
    last = []
    for layer, h in zip(gru.layers, hx, strict=True):
        x, h = _run_layer(layer, x, h, reset)
        last.append(h)
    return x, jnp.stack(last)


def _run_layer(layer: GRUWeights, x: jax.Array, h: jax.Array, reset: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    (w,), (r,), (wb,), (rb,) = layer.w, layer.r, layer.wb, layer.rb

    def step(h: jax.Array, inputs: tuple[jax.Array, jax.Array | None]) -> tuple[jax.Array, jax.Array]:
        input_gates, starts = inputs
        if starts is not None:
            h = jnp.where(starts[:, None], 0, h)
        xz, xr, xn = jnp.split(input_gates, 3, axis=1)
        hz, hr, hn = jnp.split(h @ r.T + rb, 3, axis=1)
        z = jax.nn.sigmoid(xz + hz)
        n = jnp.tanh(xn + jax.nn.sigmoid(xr + hr) * hn)
        h = (1 - z) * n + z * h
        return h, h

    h, y = lax.scan(step, h, (x @ w.T + wb, reset))  # the input products of all steps are one
    return y, h
