"""Checks of arguments. Each error names the argument, what was expected and what was given."""

from __future__ import annotations

import reprlib
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
    is_numpy = isinstance(value, np.ndarray)
    # A tensor of PyTorch with a gradient raises RuntimeError, but so does a device without memory for a NumPy array.
    errors = (TypeError, ValueError) if is_numpy else (TypeError, ValueError, RuntimeError)
    try:
        # For a NumPy array, `jnp.asarray` compiles and keeps a program for each shape.
        return jax.device_put(value) if is_numpy else jnp.asarray(value)
    except OverflowError as error:
        dtype = jnp.asarray(0).dtype.name
        raise ValueError(f"{op}: {name} must have ints in the range of {dtype}, got {reprlib.repr(value)}") from error
    except errors as error:
        raise TypeError(f"{op}: {name} must be an array, got {type(value).__name__}") from error


def as_mask(op: str, name: str, value: Any) -> jax.Array:
    """Returns a bool array from bools or numbers, as `jnp.where` reads a condition: NaN is true.

    A comparison has no derivative, so that the gradient of a floating-point mask is zero.
    """
    array = as_array(op, name, value)
    if array.dtype == np.bool_:
        return array
    if not (jnp.issubdtype(array.dtype, jnp.integer) or jnp.issubdtype(array.dtype, jnp.floating)):
        raise TypeError(f"{op}: {name} must be an array of bools, ints or floats, got {array.dtype.name}")
    return array != 0


def check_promotable(op: str, **arrays: jax.Array) -> None:
    """Checks that arrays have dtypes that JAX promotes to those of the op: not float8, complex, or keys."""
    for name, array in arrays.items():
        if not (array.dtype == np.bool_ or jnp.issubdtype(array.dtype, jnp.integer)):
            check_floating(op, name, array)


def check_floating(op: str, name: str, array: jax.Array) -> None:
    if array.dtype.name not in FLOATING:
        raise TypeError(f"{op}: {name} must have one of the dtypes {', '.join(FLOATING)}, got {array.dtype.name}")


def check_same_dtype(op: str, name: str, array: jax.Array, like_name: str, like: jax.Array) -> None:
    if array.dtype != like.dtype:
        raise TypeError(
            f"{op}: {name} must have the dtype of {like_name}, {like.dtype.name}, got {array.dtype.name}; "
            "cast one of them, for example with .astype"
        )


def check_shape(
    op: str, name: str, array: jax.Array, dims: Sequence[str], sizes: Sequence[int], note: str = ""
) -> None:
    """Checks a shape. `dims` names the dimensions as docstrings do ("3H"); `sizes` are their values in this call.

    `note` is added to the error, for instance where the sizes come from.
    """
    if tuple(array.shape) == tuple(sizes):
        return
    expected = f"[{', '.join(dims)}] = {tuple(sizes)}"
    if array.ndim != len(sizes):
        rank = f"rank {len(sizes)}, {expected}, got rank {array.ndim}, {array.shape}"
        raise ValueError(f"{op}: {name} must have {rank}{note}")
    raise ValueError(f"{op}: {name} must have the shape {expected}, got {array.shape}{note}")


def check_rank(op: str, name: str, array: jax.Array, dims: Sequence[str]) -> None:
    if array.ndim != len(dims):
        raise ValueError(
            f"{op}: {name} must have rank {len(dims)}, [{', '.join(dims)}], got rank {array.ndim}, {array.shape}"
        )


def check_choice(op: str, name: str, value: Any, choices: Sequence[Any], hint: str = "") -> None:
    if not any(value is choice or (isinstance(value, str) and value == choice) for choice in choices):
        raise ValueError(f"{op}: {name} must be one of {', '.join(map(repr, choices))}, got {value!r}{hint}")


def as_int(op: str, name: str, value: Any, expected: str = "an int") -> int:
    """Returns an int of Python or NumPy as an int of Python."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise TypeError(f"{op}: {name} must be {expected}, got {type(value).__name__}")
    return int(value)


def as_size(op: str, name: str, value: Any) -> int:
    """A positive int."""
    size = as_int(op, name, value)
    if size < 1:
        raise ValueError(f"{op}: {name} must be positive, got {size}")
    return size


def as_ints(op: str, name: str, values: Any) -> tuple[int, ...]:
    """Returns a sequence of ints of Python, NumPy or JAX, each of 64 bits, as ints of Python."""
    if (
        isinstance(values, (str, bytes))
        or not isinstance(values, (Sequence, np.ndarray, jax.Array))
        or _rank(values) == 0
        or is_key(values)
    ):
        raise TypeError(f"{op}: {name} must be a sequence of ints, got {type(values).__name__}")
    if isinstance(values, jax.Array) and not isinstance(values, jax.core.Tracer):
        values = np.asarray(values)  # JAX traces the elements of an array
    found = tuple(_element(op, name, value) for value in values)
    if not all(-(1 << 63) <= value < 1 << 63 for value in found):
        raise ValueError(f"{op}: each element of {name} must fit into 64 bits, got {found}")
    return found


def _rank(values: Any) -> int:
    return values.ndim if isinstance(values, (np.ndarray, jax.Array)) else 1


def _element(op: str, name: str, value: Any) -> int:
    if type(value) is int:  # in most calls
        return value
    if isinstance(value, jax.Array) and not isinstance(value, jax.core.Tracer) and not is_key(value):
        value = np.asarray(value)[()]
    return as_int(op, f"each element of {name}", value)


def is_key(value: Any) -> bool:
    """Whether it is an array of random keys, which has no values for NumPy."""
    return isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.extended)


def named_error(op: str, error: Exception) -> TypeError | ValueError:
    """An error of JAX for the arguments of an op, under the name of the op."""
    if isinstance(error, OverflowError):
        return ValueError(f"{op}: sizes that the arguments make must fit into 63 bits: {error}")
    return (ValueError if isinstance(error, ValueError) else TypeError)(f"{op}: {error}")


def check_flag(op: str, name: str, value: Any) -> bool:
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{op}: {name} must be a bool, got {type(value).__name__}")
    return bool(value)
