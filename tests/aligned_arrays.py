"""Arrays for kernels that are emulated on the CPU."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np


def aligned_empty(shape, dtype):
    """A NumPy array aligned to 16 bytes, as the arrays of XLA are."""
    dtype = jnp.dtype(dtype)
    size = int(np.prod(shape)) * dtype.itemsize
    spare = np.empty(size + 16, np.uint8)
    start = -spare.ctypes.data % 16
    return spare[start : start + size].view(dtype).reshape(shape)


def aligned_random(shape, dtype, seed):
    array = aligned_empty(shape, dtype)
    array[...] = np.asarray(jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype))
    return array
