"""Shared by the batch normalization layers of all frameworks: dtypes, missing scales and biases, single examples."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxgrad._src.core import checks
from jaxgrad._src.norm.backend import compute_dtype
from jaxgrad._src.norm.batch_norm import batch_norm_inference, batch_norm_training

_DTYPES = ("float32", "float64", "bfloat16", "float16")


def computes_in(*dtypes: Any) -> bool:
    """Whether the ops take these dtypes of x, of parameters and of results; None is that of x."""
    return all(dtype is None or jnp.dtype(dtype).name in _DTYPES for dtype in dtypes)


def as_batch(layer: str, name: str, x: Any) -> jax.Array:
    """The batch as an array: not a scalar, and not of random keys, which no framework normalizes."""
    x = checks.as_array(layer, name, x)
    if checks.is_key(x):
        raise TypeError(f"{layer}: {name} must be an array of numbers, got {x.dtype.name}")
    if x.ndim == 0:
        raise ValueError(f"{layer}: {name} must have at least 1 dimension, got a scalar")
    return x


def by_batch(
    x: jax.Array,
    scale: jax.Array | None,
    bias: jax.Array | None,
    *,
    dtype: Any,
    feature_axis: int,
    epsilon: float,
    axis_name: Hashable | Sequence[Hashable] | None = None,
    axis_index_groups: Any = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`(y, mean, var)` with the statistics of the batch, which are float32, or float64 if x or `dtype` is.

    Args:
      x: the batch. It is not rounded, also where `dtype` has fewer digits.
      scale, bias: [C], or None for ones and zeros.
      dtype: the dtype of y.
      feature_axis, epsilon, axis_name, axis_index_groups: as in `jaxgrad.batch_norm_training`.
    """
    x, scale, bias = _prepared(x, scale, bias, dtype, feature_axis)
    if axis_name is not None and not isinstance(axis_name, str):
        axis_name = tuple(axis_name) if isinstance(axis_name, (tuple, list)) else (axis_name,)
    y, mean, var = batch_norm_training(
        x,
        scale,
        bias,
        feature_axis=feature_axis,
        epsilon=epsilon,
        axis_name=axis_name,
        axis_index_groups=axis_index_groups,
    )
    return y.astype(dtype), mean, var


def by_statistics(
    x: jax.Array,
    scale: jax.Array | None,
    bias: jax.Array | None,
    mean: jax.Array,
    var: jax.Array,
    *,
    dtype: Any,
    feature_axis: int,
    epsilon: float,
) -> jax.Array:
    """y with given statistics, [C]. The other arguments are those of `by_batch`; x may be [C] alone."""
    x, scale, bias = _prepared(x, scale, bias, dtype, feature_axis)
    mean, var = (a.astype(scale.dtype) for a in (mean, var))
    is_vector = x.ndim == 1
    batch, axis = (x[None], 1) if is_vector else (x, feature_axis)
    y = batch_norm_inference(batch, scale, bias, mean, var, feature_axis=axis, epsilon=epsilon)
    return (y[0] if is_vector else y).astype(dtype)


def _prepared(
    x: jax.Array, scale: jax.Array | None, bias: jax.Array | None, dtype: Any, feature_axis: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """x in the wider dtype of x and the result, and [C] arrays in the dtype of the arithmetic."""
    x, scale, bias = widen(x, scale, bias, dtype)
    shape, wide = (x.shape[feature_axis],), compute_dtype(x)
    return x, jnp.ones(shape, wide) if scale is None else scale, jnp.zeros(shape, wide) if bias is None else bias


def widen(
    x: jax.Array, scale: jax.Array | None, bias: jax.Array | None, dtype: Any
) -> tuple[jax.Array, jax.Array | None, jax.Array | None]:
    """x in the wider dtype of x and the result, scale and bias in the dtype of the arithmetic."""
    x = jnp.asarray(x).astype(jnp.promote_types(jnp.result_type(x), dtype))
    scale, bias = (None if array is None else array.astype(compute_dtype(x)) for array in (scale, bias))
    return x, scale, bias
