"""GRUs of equinox: `eqx.nn.GRUCell`. Gates r, z, n; biases in the input products, and one in the recurrent product.

The recurrent bias is that of the gate n.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax

from jaxgrad._src.convert.arrays import as_jax
from jaxgrad._src.convert.gru_weights import (
    GRUWeights,
    check_bias,
    check_weights,
    merge_biases,
    read_layers,
    swap_gates,
    write_layers,
)

_READ, _WRITE = "jaxgrad.convert.equinox.read_gru", "jaxgrad.convert.equinox.write_gru"


def read_gru(*layers: eqx.nn.GRUCell | Sequence[eqx.nn.GRUCell]) -> tuple[GRUWeights, ...]:
    """Reads cells of equinox.

    Args:
      *layers: for each layer an `eqx.nn.GRUCell`, or a pair of them, the forward and the backward cell.

    Returns:
      One `GRUWeights` for each layer.

    Raises:
      TypeError: a layer is not an `eqx.nn.GRUCell`.
      ValueError: the cells of a pair do not fit together.
    """
    return read_layers(_READ, layers, read_cell)


def read_cell(cell: eqx.nn.GRUCell) -> GRUWeights:
    if not isinstance(cell, eqx.nn.GRUCell):
        raise TypeError(f"{_READ}: a layer must be an equinox.nn.GRUCell or a pair of them, got {type(cell).__name__}")
    w, r = (as_jax(_READ, name, getattr(cell, name)) for name in ("weight_ih", "weight_hh"))
    check_weights(_READ, "the cell", w, r)
    arrays = [swap_gates(a, axis=0)[None] for a in (w, r)]
    if cell.use_bias:
        bias, bias_n = (as_jax(_READ, name, getattr(cell, name)) for name in ("bias", "bias_n"))
        check_bias(_READ, "bias of the cell", bias, r.shape[0])
        check_bias(_READ, "bias_n of the cell", bias_n, r.shape[1])
        arrays += [swap_gates(bias)[None], bias_n[None]]
    return GRUWeights(*arrays, linear_before_reset=True)


def write_gru(weights: GRUWeights | Sequence[GRUWeights]) -> tuple[Any, ...]:
    """Returns cells of equinox.

    equinox has one bias where a record may have two, in the gates z and r: it is their sum. A record without biases
    gives a cell with `use_bias=False`.

    Args:
      weights: one record for each layer.

    Returns:
      For each layer an `eqx.nn.GRUCell`, or the forward and the backward cell as a pair.

    Raises:
      TypeError: weights are not `GRUWeights`.
      ValueError: the cell does not compute what a record does: `linear_before_reset=False`, `clip`, or a single
        direction in reverse.
    """
    return write_layers(_WRITE, weights, "equinox.nn.GRUCell", _write_cell, linear_before_reset=True)


def _write_cell(direction: GRUWeights) -> eqx.nn.GRUCell:
    _, _, input_size = direction.w.shape
    hidden_size = direction.r.shape[2]
    use_bias = direction.b is not None
    # Shapes in place of arrays: the initial weights are not computed.
    cell = eqx.filter_eval_shape(
        lambda: eqx.nn.GRUCell(input_size, hidden_size, use_bias, direction.w.dtype, key=jax.random.key(0))
    )
    arrays = [swap_gates(a[0], axis=0) for a in (direction.w, direction.r)]
    names = ["weight_ih", "weight_hh"]
    if use_bias:
        bias, bias_n = merge_biases(direction)
        arrays += [swap_gates(bias[0]), bias_n[0]]
        names += ["bias", "bias_n"]
    return eqx.tree_at(lambda cell: [getattr(cell, name) for name in names], cell, arrays)
