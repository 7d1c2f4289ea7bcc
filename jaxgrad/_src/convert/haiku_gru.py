"""GRUs of Haiku: the parameters of `hk.GRU`. Gates z, r, n, one bias; the reset gate multiplies the hidden state.

Haiku's gate z weighs the new state, not the old one. The logistic function of -a is 1 minus that of a: reading and
writing change the sign of all weights of z, which is exact.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxgrad._src.convert.arrays import as_jax
from jaxgrad._src.convert.gru_weights import (
    GRUWeights,
    check_weights,
    merge_biases,
    read_layers,
    write_layers,
)

_READ, _WRITE = "jaxgrad.convert.haiku.read_gru", "jaxgrad.convert.haiku.write_gru"
_PARAMETERS = ("w_i", "w_h", "b")


def read_gru(*layers: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> tuple[GRUWeights, ...]:
    """Reads the parameters of `hk.GRU`.

    Args:
      *layers: for each layer the parameters of its module, such as `params["gru"]`: "w_i", "w_h" and "b"; or a pair of
        them, the forward and the backward module.

    Returns:
      One `GRUWeights` for each layer, with `linear_before_reset=False` and one bias.

    Raises:
      TypeError: a parameter is not a floating-point array.
      ValueError: a layer does not have the parameters of `hk.GRU`.
    """
    return read_layers(_READ, layers, _read_module)


def _read_module(module: Any) -> GRUWeights:
    if not isinstance(module, Mapping) or set(module) != set(_PARAMETERS):
        found = list(module) if isinstance(module, Mapping) else type(module).__name__
        raise ValueError(
            f"{_READ}: a layer must have the parameters {', '.join(_PARAMETERS)} of haiku.GRU, got {found}"
        )
    return from_parameters(*(as_jax(_READ, name, module[name]) for name in _PARAMETERS))


def from_parameters(w_i: jax.Array, w_h: jax.Array, b: jax.Array) -> GRUWeights:
    check_weights(_READ, "a layer", w_i.T, w_h.T, b=b)
    w, r, wb = (_invert_z(a)[None] for a in (w_i.T, w_h.T, b))
    return GRUWeights(w, r, wb, linear_before_reset=False)


def _invert_z(rows: jax.Array) -> jax.Array:
    H = rows.shape[0] // 3
    return jnp.concatenate([-rows[:H], rows[H:]])


def write_gru(weights: GRUWeights | Sequence[GRUWeights]) -> tuple[Any, ...]:
    """Returns the parameters of `hk.GRU`.

    Haiku has one bias where a record may have two: it is their sum. The bias of a record without biases is zeros.

    Args:
      weights: one record for each layer.

    Returns:
      For each layer a dictionary with "w_i", "w_h" and "b", or a pair of them for two directions.

    Raises:
      TypeError: weights are not `GRUWeights`.
      ValueError: `hk.GRU` does not compute what a record does: `linear_before_reset=True`, `clip`, or a single
        direction in reverse.
    """
    return write_layers(_WRITE, weights, "haiku.GRU", _write_module, linear_before_reset=False)


def _write_module(direction: GRUWeights) -> dict[str, jax.Array]:
    bias, _ = merge_biases(direction)
    return {
        "w_i": _invert_z(direction.w[0]).T,
        "w_h": _invert_z(direction.r[0]).T,
        "b": _invert_z(bias[0]),
    }
