"""Parameters and arguments of layers of flax, linen and nnx."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax

from jaxgrad._src.convert.arrays import as_jax
from jaxgrad._src.convert.functions import Activation, computes

_ACTIVATIONS: dict[str, Activation] = {"gate_fn": "sigmoid", "activation_fn": "tanh"}


def check_functions(function: str, cell: Any, hint: str = "") -> None:
    """Raises ValueError for a GRU cell with other functions than sigmoid and tanh."""
    for argument, expected in _ACTIVATIONS.items():
        own = getattr(cell, argument)
        if not computes(own, expected):
            found = getattr(own, "__name__", own)
            raise ValueError(f"{function}: cell must have {argument}={expected}, got {found}{hint}")


def check_linear(function: str, cell: Any, hint: str = "") -> None:
    """Raises ValueError for an `nnx.GRUCell` with other layers than `nnx.Linear`, such as `nnx.LoRALinear`."""
    from flax import nnx  # linen alone does not need it

    for dense in ("dense_i", "dense_h"):
        if type(getattr(cell, dense)) is not nnx.Linear:
            found = type(getattr(cell, dense)).__name__
            raise ValueError(f"{function}: cell.{dense} must be a flax.nnx.Linear, got {found}{hint}")


def layer_of(function: str, parameters: Any, layer: Any, arguments: tuple[str, ...], kind: str) -> Any:
    """The object with the layer's arguments as attributes: the layer of linen or nnx, or `parameters` of nnx itself."""
    found = parameters if layer is None else layer
    if isinstance(found, Mapping) or not all(hasattr(found, name) for name in arguments):
        raise ValueError(
            f"{function}: layer must be a {kind} of flax.linen or flax.nnx, whose arguments are no parameters, "
            f"got {type(found).__name__}"
        )
    if getattr(found, "mask", None) is not None:
        raise ValueError(f"{function}: layer must have mask=None, because a record has no mask")
    return found


def read_parameter(function: str, parameters: Any, name: str, *, optional: bool = False) -> jax.Array | None:
    """A parameter of linen, from a dictionary with or without collections, or of nnx, from a state or a module."""
    if isinstance(parameters, Mapping):
        for collection in ("params", "batch_stats"):
            if collection in parameters and name in parameters[collection]:
                parameters = parameters[collection]
        value = parameters[name] if name in parameters else None  # noqa: SIM401
    else:
        value = getattr(parameters, name, None)
    if value is None and not optional:
        names = list(parameters) if isinstance(parameters, Mapping) else type(parameters).__name__
        raise ValueError(f"{function}: the parameters must have {name!r}, got {names}")
    return None if value is None else as_jax(function, name, value)
