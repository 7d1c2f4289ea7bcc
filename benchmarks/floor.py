"""The arithmetic floor: how long the same floating-point operations take as plain large matrix products."""

from __future__ import annotations

from functools import cache

import jax
import jax.numpy as jnp

from benchmarks.timing import Effort, interleaved, jax_contender

_SIZE = {"cpu": 2048, "gpu": 8192}  # of the square matrices
_EFFORT = Effort(rounds=5, seconds=1)


@cache
def matmul_gflops(dtype: str) -> float:
    """The rate of the best of X Y, X' Y and X Y' in this process, at JAX's default precision.

    16-bit types count at the rate of float32 where that is higher, as on a CPU that has no instructions for them.
    """
    n = _SIZE[jax.default_backend()]
    a, b = (jax.random.normal(key, (n, n), dtype) for key in jax.random.split(jax.random.key(0)))
    contenders = [
        jax_contender("X Y", lambda a, b: a @ b, a, b),
        jax_contender("X' Y", lambda a, b: a.T @ b, a, b),
        jax_contender("X Y'", lambda a, b: a @ b.T, a, b),
    ]
    best_ms = min(times.p10 for times in interleaved(contenders, _EFFORT).values())
    rate = 2 * n**3 / best_ms / 1e6
    return max(rate, matmul_gflops("float32")) if jnp.dtype(dtype).itemsize == 2 else rate


def floor_ms(flops: int, dtype: str) -> float:
    return flops / matmul_gflops(dtype) / 1e6
