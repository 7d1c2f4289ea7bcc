"""Normalization as flax writes it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax


def normalized(
    kind: str,
    x: jax.Array,
    scale: jax.Array,
    bias: jax.Array | None = None,
    residual: jax.Array | None = None,
    *,
    epsilon: float,
    groups: int = 1,
    feature_axis: int = -1,
) -> jax.Array:
    """The formulas of flax.linen.normalization: moments in float32, the variance as E[x^2] - E[x]^2.

    A residual is added to the result in the dtype of x, as flax's example of ResNet does.

    Args:
      kind: "batch-norm", "group-norm", "layer-norm" or "rms-norm". The last two normalize the feature axis.
      groups: of group norm.
    """
    at = feature_axis % x.ndim
    others = tuple(axis for axis in range(x.ndim) if axis != at)
    scale, bias = (None if array is None else lax.expand_dims(array, others) for array in (scale, bias))
    wide, axes = x.astype(jnp.float32), others if kind == "batch-norm" else (at,)
    if kind == "group-norm":
        wide = wide.reshape(*x.shape[:at], groups, -1, *x.shape[at + 1 :])
        axes = tuple(axis for axis in range(1, wide.ndim) if axis != at)
    mean, square = (array.mean(axes, keepdims=True) for array in (wide, lax.square(wide)))
    mean = jnp.zeros_like(mean) if kind == "rms-norm" else mean
    var = jnp.maximum(square - lax.square(mean), 0)
    if kind == "group-norm":
        mean, var = (jnp.repeat(array.squeeze(at + 1), x.shape[at] // groups, at) for array in (mean, var))
    y = (x - mean) * (lax.rsqrt(var + epsilon) * scale)
    y = (y if bias is None else y + bias).astype(x.dtype)
    return y if residual is None else y + residual
