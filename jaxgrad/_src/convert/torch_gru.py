"""GRUs of PyTorch: the state dict of `torch.nn.GRU`. Gates r, z, n; the reset gate multiplies the recurrent product."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax

from jaxgrad._src.convert.gru_weights import (
    GRUWeights,
    as_layers,
    check_expressible,
    check_weights,
    recurrent_bias,
    split_directions,
    stack_directions,
    swap_gates,
)
from jaxgrad._src.convert.torch_parameters import read_parameter

_READ, _WRITE = "jaxgrad.convert.torch.read_gru", "jaxgrad.convert.torch.write_gru"


def read_gru(state_dict: Mapping[str, Any], prefix: str = "") -> tuple[GRUWeights, ...]:
    """Reads the state dict of a `torch.nn.GRU`, with any number of layers, one or two directions, with or without bias.

    Args:
      state_dict: the state dict of the GRU or of a module that contains it; tensors or arrays.
      prefix: the path of the GRU within the module with a final dot, such as "encoder.gru.".

    Returns:
      One `GRUWeights` for each layer.

    Raises:
      TypeError: state_dict is not a mapping, or a value is not a floating-point array.
      ValueError: there is no GRU with this prefix, or JAX has no dtype for it without `jax_enable_x64`.
    """
    read_parameter(_READ, state_dict, prefix, "weight_ih_l0")  # raises an error if there is no layer
    layers: list[GRUWeights] = []
    while f"{prefix}weight_ih_l{len(layers)}" in state_dict:
        stem = f"l{len(layers)}"
        suffixes = [stem] + [f"{stem}_reverse"] * (f"{prefix}weight_ih_{stem}_reverse" in state_dict)
        layers.append(stack_directions(_READ, [_read_direction(state_dict, prefix, suffix) for suffix in suffixes]))
    return tuple(layers)


def _read_direction(state_dict: Mapping[str, Any], prefix: str, suffix: str) -> GRUWeights:
    def read(kind: str) -> jax.Array:
        return read_parameter(_READ, state_dict, prefix, f"{kind}_{suffix}")

    w, r = read("weight_ih"), read("weight_hh")
    names = ("bias_ih", "bias_hh")
    has_bias = any(f"{prefix}{name}_{suffix}" in state_dict for name in names)
    biases = {name: read(name) for name in names} if has_bias else {}
    check_weights(_READ, f"{prefix}weight_ih_{suffix}", w, r, **biases)
    return GRUWeights(*(swap_gates(a, axis=0)[None] for a in (w, r, *biases.values())), linear_before_reset=True)


def write_gru(weights: GRUWeights | Sequence[GRUWeights], prefix: str = "") -> dict[str, jax.Array]:
    """Returns the state dict of a `torch.nn.GRU` with one layer for each record.

    Load it by `module.load_state_dict({key: torch.from_dlpack(array) for key, array in state_dict.items()})`. Biases
    that a record does not have are zeros, unless no record has any.

    Args:
      weights: one record for each layer.
      prefix: put before each key, such as "encoder.gru.".

    Returns:
      A dictionary with the keys of `torch.nn.GRU`, such as "weight_ih_l0", and arrays of JAX.

    Raises:
      TypeError: weights are not `GRUWeights`.
      ValueError: PyTorch's GRU does not compute what a record does: `linear_before_reset=False`, `clip`, or a single
        direction in reverse.
    """
    layers = as_layers(_WRITE, weights)
    has_bias = any(layer.b is not None for layer in layers)
    state_dict = {}
    for number, layer in enumerate(layers):
        check_expressible(_WRITE, layer, "torch.nn.GRU", linear_before_reset=True)
        for direction, suffix in zip(split_directions(layer), ("", "_reverse"), strict=False):
            arrays = {"weight_ih": direction.w, "weight_hh": direction.r}
            if has_bias:
                zeros = jax.numpy.zeros_like(direction.r[:, :, 0])
                rb = recurrent_bias(direction)
                arrays["bias_ih"] = zeros if direction.wb is None else direction.wb
                arrays["bias_hh"] = zeros if rb is None else rb
            for kind, array in arrays.items():
                state_dict[f"{prefix}{kind}_l{number}{suffix}"] = swap_gates(array[0], axis=0)
    return state_dict
