"""Arrays of NumPy, JAX, PyTorch and flax as arrays of JAX, with the same dtype."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np


def as_jax(function: str, name: str, value: Any) -> jax.Array:
    """Returns `value` as a JAX array of the same dtype, which shares no memory with it."""
    try:
        array = _as_array(value)
    except Exception as error:  # libraries raise errors of several types for tensors without data or with other layouts
        found = f"{type(value).__name__} of {getattr(value, 'dtype', 'no dtype')}"
        raise TypeError(f"{function}: {name} must be a floating-point array, got {found}") from error
    if not jnp.issubdtype(array.dtype, jnp.floating) or array.dtype.itemsize > 8:
        found = f"{type(value).__name__} of {array.dtype}"
        raise TypeError(f"{function}: {name} must be a floating-point array, got {found}")
    if isinstance(array, jax.Array):
        return array
    if array.dtype == np.float64 and not jax.config.jax_enable_x64:  # type: ignore[attr-defined]
        raise ValueError(
            f"{function}: {name} has the dtype float64, which JAX has only with jax_enable_x64; "
            "enable it, or cast the weights to float32 first"
        )
    return jnp.array(array)


def _as_array(value: Any) -> jax.Array | np.ndarray:
    if hasattr(value, "detach"):  # a tensor of PyTorch, which NumPy reads on the CPU, and not in bfloat16
        value = value.detach().cpu()
        is_bfloat16 = str(value.dtype) == "torch.bfloat16"
        return value.float().numpy().astype(ml_dtypes.bfloat16) if is_bfloat16 else value.numpy()
    if hasattr(value, "__jax_array__"):  # a variable of flax.nnx or Keras
        return jnp.asarray(value)
    return value if isinstance(value, jax.Array) else np.asarray(value)
