"""GRUs of flax: the parameters of `linen.GRUCell` and `nnx.GRUCell`.

linen has an array for each gate, one bias for each input product, and one for the recurrent product of the gate n. nnx
has the gates in the order r, z, n in one array, and no bias in the recurrent product.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from jaxgrad._src.convert.arrays import as_jax
from jaxgrad._src.convert.flax_layers import check_functions, check_linear
from jaxgrad._src.convert.gru_weights import (
    GRUWeights,
    check_weights,
    merge_biases,
    stack_directions,
    swap_gates,
    write_layers,
)
from jaxgrad._src.core import checks

_READ, _WRITE = "jaxgrad.convert.flax.read_gru", "jaxgrad.convert.flax.write_gru"
_GATES = "zrn"


def read_gru(*layers: Any) -> tuple[GRUWeights, ...]:
    """Reads the parameters of `GRUCell`, `RNN` and `Bidirectional` of flax, linen or nnx, with sigmoid and tanh.

    Args:
      *layers: for each layer the parameters of linen as a nested dictionary, with or without the collection "params";
        or the state or the module of nnx; or a pair of these, the forward and the backward cell.

    Returns:
      One `GRUWeights` for each layer. Those of linen have biases in the input products and the gate n of the recurrent
      product; those of nnx have biases in the input products. That of an `nnx.RNN` with `reverse` has `reverse=True`.

    Raises:
      TypeError: a parameter is not a floating-point array.
      ValueError: a layer is not a GRU of flax, a cell of nnx has other functions than sigmoid and tanh or other layers
        than `nnx.Linear`, or the cells of a pair do not fit together.
    """
    return tuple(_read_layer(layer) for layer in layers)


def read_cell(cell: Any) -> GRUWeights:
    """The weights of one cell: parameters of linen, or the state or the module of nnx."""
    if all(_has(cell, name) for name in ("ir", "iz", "hn")):
        return _read_linen(cell)
    if _has(cell, "dense_i"):
        return _read_nnx(cell)
    names = list(cell) if isinstance(cell, Mapping) else type(cell).__name__
    raise ValueError(
        f"{_READ}: a layer must have the parameters of linen.GRUCell (ir, iz, in, hr, hz, hn) or nnx.GRUCell "
        f"(dense_i, dense_h), got {names}"
    )


def _has(tree: Any, name: str) -> bool:
    return name in tree if isinstance(tree, Mapping) else hasattr(tree, name)


def _get(tree: Any, name: str) -> Any:
    return tree[name] if isinstance(tree, Mapping) else getattr(tree, name)


def _parameter(cell: Any, dense: str, parameter: str) -> Any:
    if not _has(cell, dense) or not _has(_get(cell, dense), parameter):
        raise ValueError(f"{_READ}: a layer must have the parameter {dense}.{parameter} of a GRUCell of flax")
    return _get(_get(cell, dense), parameter)


def _read_layer(layer: Any) -> GRUWeights:
    if isinstance(layer, (tuple, list)):
        return stack_directions(_READ, [_read_layer(direction) for direction in layer])
    if isinstance(layer, Mapping) and "params" in layer:
        return _read_layer(layer["params"])
    if _has(layer, "forward_rnn"):
        return _read_layer((_get(layer, "forward_rnn"), _get(layer, "backward_rnn")))
    if not _has(layer, "cell"):
        return read_cell(layer)
    reverse = not isinstance(layer, Mapping) and bool(getattr(layer, "reverse", False))
    return dataclasses.replace(read_cell(_get(layer, "cell")), reverse=reverse)


def _read_linen(cell: Any) -> GRUWeights:
    dims: dict[str, tuple[str, ...]] = {f"{name}.bias": ("H",) for name in ("iz", "ir", "in", "hn")}
    for side, size in (("i", "I"), ("h", "H")):
        dims |= {f"{side}{gate}.kernel": (size, "H") for gate in _GATES}
    arrays = {name: as_jax(_READ, name, _parameter(cell, *name.split("."))) for name in dims}
    for name in ("iz.kernel", "hz.kernel"):
        checks.check_rank(_READ, f"{name} of the cell", arrays[name], dims[name])
    sizes = {"I": arrays["iz.kernel"].shape[0], "H": arrays["hz.kernel"].shape[0]}
    for name, array in arrays.items():
        checks.check_shape(_READ, f"{name} of the cell", array, dims[name], [sizes[dim] for dim in dims[name]])

    def join(side: str, parameter: str) -> jax.Array:
        return jnp.concatenate([arrays[f"{side}{gate}.{parameter}"].T for gate in _GATES])[None]

    w, r, wb, rb = join("i", "kernel"), join("h", "kernel"), join("i", "bias"), arrays["hn.bias"][None]
    return GRUWeights(w, r, wb, rb, linear_before_reset=True)


def _read_nnx(cell: Any) -> GRUWeights:
    def read(dense: str, parameter: str) -> jax.Array:
        return as_jax(_READ, f"{dense}.{parameter}", _parameter(cell, dense, parameter)).T

    if not isinstance(cell, Mapping):
        check_functions(_READ, cell)
        check_linear(_READ, cell)
    w, r, bias = read("dense_i", "kernel"), read("dense_h", "kernel"), read("dense_i", "bias")
    check_weights(_READ, "the cell", w, r, bias=bias)
    return GRUWeights(*(swap_gates(array, axis=0)[None] for array in (w, r, bias)), linear_before_reset=True)


def write_gru(weights: GRUWeights | Sequence[GRUWeights], *, api: Literal["linen", "nnx"] = "linen") -> tuple[Any, ...]:
    """Returns the parameters of `GRUCell` of flax.

    linen has one bias where a record may have two, in the gates z and r: it is their sum. Biases that a record does not
    have are zeros.

    Args:
      weights: one record for each layer.
      api: "linen" or "nnx".

    Returns:
      For each layer the parameters of the cell as a nested dictionary, or those of the forward and the backward cell as
      a pair. Those of nnx are loaded by `nnx.update(cell, parameters)`.

    Raises:
      TypeError: weights are not `GRUWeights`.
      ValueError: flax's GRU does not compute what a record does: `linear_before_reset=False`, `clip`, a single
        direction in reverse, or, for nnx, a bias in the recurrent product of the gate n that is not zero.
    """
    checks.check_choice(_WRITE, "api", api, ("linen", "nnx"))
    write_cell = _write_linen if api == "linen" else _write_nnx
    return write_layers(_WRITE, weights, f"flax.{api}.GRUCell", write_cell, linear_before_reset=True)


def _write_linen(direction: GRUWeights) -> dict[str, Any]:
    bias, bias_n = merge_biases(direction)
    cell: dict[str, Any] = {}
    for side, array in (("i", direction.w), ("h", direction.r)):
        for gate, rows in zip(_GATES, jnp.split(array[0], 3), strict=True):
            cell[side + gate] = {"kernel": rows.T}
    for gate, part in zip(_GATES, jnp.split(bias[0], 3), strict=True):
        cell[f"i{gate}"]["bias"] = part
    cell["hn"]["bias"] = bias_n[0]
    return cell


def _write_nnx(direction: GRUWeights) -> dict[str, Any]:
    bias, bias_n = merge_biases(direction)
    if direction.rb is not None and np.any(np.asarray(bias_n)):
        raise ValueError(
            f"{_WRITE}: weights must have zeros as the recurrent bias of the gate n, which flax.nnx.GRUCell does not "
            f"have, got values up to {np.abs(np.asarray(bias_n)).max()}"
        )
    kernels = [swap_gates(array[0], axis=0).T for array in (direction.w, direction.r)]
    return {"dense_i": {"kernel": kernels[0], "bias": swap_gates(bias[0])}, "dense_h": {"kernel": kernels[1]}}
