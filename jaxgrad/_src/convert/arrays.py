"""Arrays of NumPy, JAX, PyTorch and flax as arrays of JAX, with the same dtype."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np


def as_jax(function: str, name: str, value: Any) -> jax.Array:
    """Returns `value` as a JAX array of the same dtype, which shares no memory with it."""
    if hasattr(value, "detach"):  # a tensor of PyTorch, which NumPy reads on the CPU, and not in bfloat16
        value = value.detach().cpu()
        is_bfloat16 = str(value.dtype) == "torch.bfloat16"
        value = value.float().numpy().astype(ml_dtypes.bfloat16) if is_bfloat16 else value.numpy()
    elif hasattr(value, "__jax_array__"):  # a variable of flax.nnx or Keras
        value = jnp.asarray(value)
    if isinstance(value, jax.Array):
        return value
    array = np.asarray(value)
    if array.dtype.kind not in "fV":  # V: the extended dtypes of ml_dtypes
        raise TypeError(
            f"{function}: {name} must be a floating-point array, got {type(value).__name__} of {array.dtype}"
        )
    if array.dtype == np.float64 and not jax.config.jax_enable_x64:  # type: ignore[attr-defined]
        raise ValueError(
            f"{function}: {name} has the dtype float64, which JAX has only with jax_enable_x64; "
            "enable it, or cast the weights to float32 first"
        )
    return jnp.array(array)
