"""How records of `jaxgrad.convert` are compared with the layer of another framework that they were read from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from converted_gru import assert_same_bits, assert_trees_close, normal


def loss(y: Any) -> jax.Array:
    return jnp.vdot(jnp.cos(jnp.arange(y.size, dtype=y.dtype)).reshape(y.shape), y)


def check_record(
    record: Any,
    write: Callable[[Any], Any],
    parameters: Any,
    layer: Callable[[Any, Any], Any],
    x: np.ndarray,
    call: Callable[[Any, Any], Any] = lambda record, x: record(x),
) -> None:
    """A record computes the values and the gradients of a layer, and is written back with the same bits.

    Args:
      record: what was read.
      write: returns the layer's parameters of a record, and of its gradient.
      parameters: the parameters of the layer.
      layer: `layer(parameters, x)`, the layer's own result.
      x: the input.
      call: `call(record, x)`, the result of the record.
    """
    assert_same_bits(write(record), parameters)
    y, gradient = _value_and_gradient(call, record, x)
    expected = _value_and_gradient(layer, parameters, x)
    assert_trees_close((y, write(gradient)), expected)


def _value_and_gradient(call, weights, x):
    def run(weights):
        y = call(weights, x)
        return loss(y), y

    gradient, y = jax.jit(jax.grad(run, has_aux=True))(weights)
    return y, gradient


def images(*spatial: int, features: int = 8, channels_last: bool = True, n: int = 3) -> np.ndarray:
    return normal(n, *spatial, features) if channels_last else normal(n, features, *spatial)
