"""Checks of the arguments that the ops of normalization share."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxgrad._src.core import checks
from jaxgrad._src.norm.backend import compute_dtype

ACTIVATIONS = (None, "relu", "silu", "gelu")


def check_epsilon(op: str, epsilon: Any) -> float:
    if isinstance(epsilon, bool) or not isinstance(epsilon, (int, float, np.integer, np.floating)):
        raise TypeError(f"{op}: epsilon must be a Python number, got {type(epsilon).__name__}")
    if not 0 <= epsilon < math.inf:
        raise ValueError(f"{op}: epsilon must be finite and not negative, got {epsilon}")
    return float(epsilon)


def check_x(op: str, x: Any, smallest_rank: int) -> jax.Array:
    x = checks.as_array(op, "x", x)
    checks.check_floating(op, "x", x)
    if x.ndim < smallest_rank:
        raise ValueError(f"{op}: x must have rank {smallest_rank} or more, got rank {x.ndim}, {x.shape}")
    return x


def check_axis(op: str, name: str, axis: Any, x: jax.Array) -> int:
    """Returns an axis of x that is not negative."""
    axis = checks.as_int(op, name, axis)
    if not -x.ndim <= axis < x.ndim:
        raise ValueError(f"{op}: {name} must lie in [{-x.ndim}, {x.ndim}), as x has rank {x.ndim}, got {axis}")
    return axis % x.ndim


def check_residual(op: str, residual: Any, x: jax.Array) -> jax.Array | None:
    if residual is None:
        return None
    residual = checks.as_array(op, "residual", residual)
    if residual.shape != x.shape:
        raise ValueError(f"{op}: residual must have the shape of x, {x.shape}, got {residual.shape}")
    checks.check_same_dtype(op, "residual", residual, "x", x)
    return residual


def check_pair(op: str, arrays: dict[str, jax.Array], x: jax.Array) -> None:
    """Checks the dtypes of two arrays of parameters, or of one."""
    (first, array), *others = arrays.items()
    check_dtype(op, first, array.dtype, x)
    for name, other in others:
        checks.check_same_dtype(op, name, other, first, array)


def check_dtype(op: str, name: str, dtype: Any, x: jax.Array) -> None:
    """Checks the dtype of parameters or statistics."""
    allowed = list(dict.fromkeys([x.dtype.name, compute_dtype(x).name]))
    if dtype.name not in allowed:
        raise TypeError(
            f"{op}: {name} must have the dtype {' or '.join(allowed)}, as x has {x.dtype.name}, got {dtype.name}"
        )


def check_parameters(
    op: str, scale: Any, bias: Any, dims: Sequence[str], sizes: tuple[Any, ...], x: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns scale and bias. None stands for ones and for zeros."""
    given = {"scale": scale, "bias": bias}
    arrays = {name: checks.as_array(op, name, value) for name, value in given.items() if value is not None}
    for name, array in arrays.items():
        checks.check_shape(op, name, array, dims, sizes)
    if arrays:
        check_pair(op, arrays, x)
    dtype = next((array.dtype for array in arrays.values()), compute_dtype(x))
    return arrays.get("scale", jnp.ones(sizes, dtype)), arrays.get("bias", jnp.zeros(sizes, dtype))
