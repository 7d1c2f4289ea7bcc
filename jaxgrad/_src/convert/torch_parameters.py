"""Parameters in state dicts of PyTorch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, overload

import jax

from jaxgrad._src.convert.arrays import as_jax


@overload
def read_parameter(function: str, state_dict: Any, prefix: str, name: str) -> jax.Array: ...


@overload
def read_parameter(function: str, state_dict: Any, prefix: str, name: str, *, optional: bool) -> jax.Array | None: ...


def read_parameter(
    function: str, state_dict: Any, prefix: str, name: str, *, optional: bool = False
) -> jax.Array | None:
    """Returns a parameter of the module with this prefix; None if it is optional and missing."""
    if not isinstance(state_dict, Mapping):
        raise TypeError(
            f"{function}: state_dict must be a mapping, got {type(state_dict).__name__}; of a module, call state_dict()"
        )
    key = f"{prefix}{name}"
    if key not in state_dict and optional:
        return None
    if key not in state_dict:
        found = [key.removesuffix(name) for key in state_dict if key.endswith(f".{name}") or key == name]
        raise ValueError(f"{function}: state_dict has no {key}; prefixes with {name!r} in it: {found}")
    return as_jax(function, key, state_dict[key])
