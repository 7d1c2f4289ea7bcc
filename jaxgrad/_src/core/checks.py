"""Checks of arguments. Each error names the argument, what was expected and what was given."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

FLOATING = ("float32", "float64", "bfloat16", "float16")


def as_array(op: str, name: str, value: Any) -> jax.Array:
    """Returns `value` as a JAX array, without a copy if it is one."""
    if isinstance(value, jax.Array):
        return value
    try:
        # For a NumPy array, `jnp.asarray` compiles and keeps a program for each shape.
        return jax.device_put(value) if isinstance(value, np.ndarray) else jnp.asarray(value)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{op}: {name} must be an array, got {type(value).__name__}") from error


def check_floating(op: str, name: str, array: jax.Array) -> None:
    if array.dtype.name not in FLOATING:
        raise TypeError(f"{op}: {name} must have one of the dtypes {', '.join(FLOATING)}, got {array.dtype.name}")


def check_same_dtype(op: str, name: str, array: jax.Array, like_name: str, like: jax.Array) -> None:
    if array.dtype != like.dtype:
        raise TypeError(
            f"{op}: {name} must have the dtype of {like_name}, {like.dtype.name}, got {array.dtype.name}; "
            "cast one of them, for example with .astype"
        )


def check_shape(op: str, name: str, array: jax.Array, dims: Sequence[str], sizes: Sequence[int]) -> None:
    """Checks a shape. `dims` names the dimensions as docstrings do ("3H"); `sizes` are their values in this call."""
    if tuple(array.shape) == tuple(sizes):
        return
    expected = f"[{', '.join(dims)}] = {tuple(sizes)}"
    if array.ndim != len(sizes):
        raise ValueError(f"{op}: {name} must have rank {len(sizes)}, {expected}, got rank {array.ndim}, {array.shape}")
    raise ValueError(f"{op}: {name} must have the shape {expected}, got {array.shape}")


def check_rank(op: str, name: str, array: jax.Array, dims: Sequence[str]) -> None:
    if array.ndim != len(dims):
        raise ValueError(
            f"{op}: {name} must have rank {len(dims)}, [{', '.join(dims)}], got rank {array.ndim}, {array.shape}"
        )


def check_choice(op: str, name: str, value: Any, choices: Sequence[Any]) -> None:
    if not any(value is choice or (isinstance(value, str) and value == choice) for choice in choices):
        raise ValueError(f"{op}: {name} must be one of {', '.join(map(repr, choices))}, got {value!r}")


def check_flag(op: str, name: str, value: Any) -> bool:
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{op}: {name} must be a bool, got {type(value).__name__}")
    return bool(value)
