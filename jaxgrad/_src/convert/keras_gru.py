"""GRUs of Keras 3: the weights of `keras.layers.GRU`. Gates z, r, n; `reset_after` is `linear_before_reset`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jaxgrad._src.convert.arrays import as_jax
from jaxgrad._src.convert.functions import Activation, computes
from jaxgrad._src.convert.gru_weights import (
    GRUWeights,
    as_layers,
    check_expressible,
    check_weights,
    merge_biases,
    recurrent_bias,
    split_directions,
    stack_directions,
)

# The functions that `jaxgrad.gru` applies, by the arguments of `keras.layers.GRU`.
ACTIVATIONS: dict[str, Activation] = {"activation": "tanh", "recurrent_activation": "sigmoid"}
_READ, _WRITE = "jaxgrad.convert.keras.read_gru", "jaxgrad.convert.keras.write_gru"


def read_gru(*layers: Any, reset_after: bool | None = None) -> tuple[GRUWeights, ...]:
    """Reads GRU layers of Keras 3.

    Args:
      *layers: each a `keras.layers.GRU`, or a `keras.layers.Bidirectional` or `keras.layers.RNN` of one; or the result
        of `get_weights()` of such a layer, a list of arrays.
      reset_after: the layer's argument, for lists of arrays without bias; otherwise None.

    Returns:
      One `GRUWeights` for each layer. Those of a layer with `go_backwards` have `reverse=True`; Keras also reverses the
      results of such a layer.

    Raises:
      TypeError: a weight is not a floating-point array.
      ValueError: the layer has other activations than tanh and the logistic function, the list is not that of a GRU,
        reset_after is missing or differs from the layer's, or the directions of a layer do not fit together.
    """
    return tuple(_read_layer(layer, reset_after) for layer in layers)


def _read_layer(layer: Any, reset_after: bool | None) -> GRUWeights:
    if isinstance(layer, (list, tuple)):
        return from_arrays(layer, reset_after)
    if hasattr(layer, "forward_layer"):
        directions = [_read_layer(part, reset_after) for part in (layer.forward_layer, layer.backward_layer)]
        return stack_directions(_READ, directions)
    cell = getattr(layer, "cell", layer)
    if not all(hasattr(cell, name) for name in ("reset_after", "recurrent_kernel")):
        raise ValueError(f"{_READ}: a layer must be a built keras.layers.GRU, got {type(layer).__name__}")
    for name, expected in ACTIVATIONS.items():
        own = getattr(cell, name)
        found = getattr(own, "__name__", own)
        is_expected = computes(own, expected)
        # None: a function of Keras on another backend, which has only its name.
        if not (found == expected if is_expected is None else is_expected):
            raise ValueError(f"{_READ}: a layer must have {name}={expected!r}, got {found!r}")
    if reset_after is not None and reset_after != cell.reset_after:
        raise ValueError(f"{_READ}: reset_after={reset_after}, but the layer has reset_after={cell.reset_after}")
    return from_arrays(cell.get_weights(), cell.reset_after, bool(getattr(layer, "go_backwards", False)))


def from_arrays(weights: Sequence[Any], reset_after: bool | None, reverse: bool = False) -> GRUWeights:
    """The record of a layer from its arrays: kernel, recurrent kernel and perhaps bias, for each direction."""
    if len(weights) in (4, 6):
        half = len(weights) // 2
        return stack_directions(
            _READ, [from_arrays(weights[:half], reset_after), from_arrays(weights[half:], reset_after)]
        )
    if len(weights) not in (2, 3):
        raise ValueError(
            f"{_READ}: a list must have a kernel, a recurrent kernel and perhaps a bias for each of one or two "
            f"directions, got {len(weights)} arrays"
        )
    kernel, recurrent, *bias = (as_jax(_READ, f"array {number}", array) for number, array in enumerate(weights))
    w, r = kernel.T, recurrent.T
    check_weights(_READ, "a layer", w, r)
    biases: list[jax.Array] = []
    if bias:
        if bias[0].shape not in ((2, r.shape[0]), (r.shape[0],)):
            shapes = f"(2, {r.shape[0]}) or ({r.shape[0]},)"
            raise ValueError(f"{_READ}: the bias must have the shape {shapes}, got {bias[0].shape}")
        after = bias[0].ndim == 2
        if reset_after is not None and reset_after != after:
            raise ValueError(f"{_READ}: reset_after={reset_after} does not have a bias of shape {bias[0].shape}")
        reset_after = after
        biases = [part[None] for part in (bias[0] if after else bias)]
    if reset_after is None:
        raise ValueError(
            f"{_READ}: reset_after must be given for a list without bias, as True (Keras's default) or False"
        )
    return GRUWeights(w[None], r[None], *biases, linear_before_reset=reset_after, reverse=reverse)


def write_gru(weights: GRUWeights | Sequence[GRUWeights]) -> tuple[list[np.ndarray], ...]:
    """Returns the weights of `keras.layers.GRU`, or of `keras.layers.Bidirectional` for two directions.

    The layer has `reset_after` as `linear_before_reset` of the record. With `reset_after=False` Keras has one bias
    where a record may have two: it is their sum. A record without biases is that of a layer with `use_bias=False`.

    Args:
      weights: one record for each layer.

    Returns:
      For each layer a list of NumPy arrays for `layer.set_weights`.

    Raises:
      TypeError: weights are not `GRUWeights`.
      ValueError: a record has `clip`, which Keras does not have.
    """
    written = []
    for layer in as_layers(_WRITE, weights):
        check_expressible(_WRITE, layer, "keras.layers.GRU", linear_before_reset=None, reverse=True)
        arrays = [array for direction in split_directions(layer) for array in _write_direction(direction)]
        written.append([np.asarray(array) for array in arrays])
    return tuple(written)


def _write_direction(direction: GRUWeights) -> list[Any]:
    kernels = [direction.w[0].T, direction.r[0].T]
    if direction.b is None:
        return kernels
    if not direction.linear_before_reset:
        return [*kernels, merge_biases(direction)[0][0]]
    zeros = np.zeros_like(np.asarray(direction.r[0, :, 0]))
    rb = recurrent_bias(direction)
    parts = [zeros if direction.wb is None else direction.wb[0], zeros if rb is None else rb[0]]
    return [*kernels, np.stack([np.asarray(part) for part in parts])]
