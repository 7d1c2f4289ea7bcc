"""The only call of `jax.ffi.ffi_call`: every compiled handler is called through `ffi_call` below.

Conventions of all handlers: an absent operand and a result that is not needed are arrays without elements, and the last
result is the workspace.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def ffi_call(
    target: str,
    results: Sequence[jax.ShapeDtypeStruct],
    operands: Sequence[jax.Array],
    workspace: int,
    **attributes: Any,
) -> list[jax.Array]:
    """Calls a handler.

    Args:
      target: the name under which the handler is registered.
      results: the shapes and dtypes of the results.
      operands: the operands.
      workspace: bytes of workspace, passed to the handler as one more result.
      **attributes: bools, ints, floats and sequences of ints.

    Returns:
      The results without the workspace.
    """
    call = jax.ffi.ffi_call(target, (*results, jax.ShapeDtypeStruct((workspace,), np.uint8)))
    *found, _ = call(*operands, **{name: _attribute(value) for name, value in attributes.items()})
    return found


def empty_if_none(array: jax.Array | None, dtype: Any) -> jax.Array:
    """Returns the operand of a handler for an array that may be absent."""
    return jnp.zeros((0,), dtype) if array is None else array


def empty_like(shape: Any) -> jax.ShapeDtypeStruct:
    """Returns the result of a handler that is not needed, of the dtype of `shape`."""
    return jax.ShapeDtypeStruct((0,), shape.dtype)


def _attribute(value: Any) -> Any:
    """The NumPy type that fixes the attribute's type: Python's own scalars follow JAX's 64-bit flag."""
    if isinstance(value, bool):
        return np.bool_(value)
    if isinstance(value, int):
        return np.int64(value)
    if isinstance(value, float):
        return np.float64(value)
    return np.array(value, np.int64)
