"""The roofline: the time of the same operations as large matrix products or multiply-adds, or of the same bytes as a
large addition.

Reports call it `floor_ms`.
"""

from __future__ import annotations

from functools import cache, partial

import jax
import jax.numpy as jnp

from benchmarks.options import Effort
from benchmarks.timing import Call, interleaved, jax_contenders

_SIZE = {"cpu": 2048, "gpu": 8192}  # of square matrices
_SUM_ELEMENTS = 1 << 25
_PRODUCTS, _FACTORS = 1 << 24, 512
_EFFORT = Effort(rounds=5, seconds=1)


@cache
def matmul_gflops(dtype: str, precision: str | None = None) -> float:
    """The rate of the fastest of X Y, X' Y and X Y' in this process. The precision is JAX's default one, or as given.

    16-bit types count at the rate of float32 where that is higher, as on a CPU that has no instructions for them.
    """
    n = _SIZE[jax.default_backend()]
    a, b = (jax.random.normal(key, (n, n), dtype) for key in jax.random.split(jax.random.key(0)))
    product = partial(jnp.matmul, precision=precision)
    calls = [
        Call("X Y", product, (a, b)),
        Call("X' Y", lambda a, b: product(a.T, b), (a, b)),
        Call("X Y'", lambda a, b: product(a, b.T), (a, b)),
    ]
    best_ms = min(times.p10 for times in interleaved(jax_contenders(calls), _EFFORT).values())
    rate = 2 * n**3 / best_ms / 1e6
    return max(rate, matmul_gflops("float32", precision)) if jnp.dtype(dtype).itemsize == 2 else rate


@cache
def memory_gbps() -> float:
    """The rate at which X + Y is read and written, for float32 arrays larger than any cache."""
    a = jnp.ones((_SUM_ELEMENTS,), jnp.float32)
    times = interleaved(jax_contenders([Call("X + Y", jnp.add, (a, a + 1))]), _EFFORT)
    return 3 * a.nbytes / times["X + Y"].p10 / 1e6


@cache
def fma_gflops() -> float:
    """The rate of float32 multiplications and additions outside of tensor cores, by fused multiply-adds.

    On a CPU matrix products have the same instructions and keep them busy. A GPU takes as long for a multiplication as
    for a fused multiply-add. Multiplications are timed, because XLA does not fuse them with additions.
    """
    if jax.default_backend() == "cpu":
        return matmul_gflops("float32", None)  # as compare.py calls it: a cached result
    x = jnp.ones((_PRODUCTS,), jnp.float32)
    times = interleaved(jax_contenders([Call("x y y ...", products_in_turn, (x, x))]), _EFFORT)
    return 2 * _FACTORS * _PRODUCTS / times["x y y ..."].p10 / 1e6


def products_in_turn(x: jax.Array, y: jax.Array) -> jax.Array:
    """x y y y ..., which XLA computes in one kernel, with an instruction for each factor."""
    for _ in range(_FACTORS):
        x = x * y
    return x


def roofline_ms(flops: int, gflops: float, bytes_moved: int = 0) -> float:
    """The larger of the times of the arithmetic and of the memory traffic; 0 operations or bytes take no time."""
    return max(flops / gflops / 1e6 if flops else 0.0, bytes_moved / memory_gbps() / 1e6 if bytes_moved else 0.0)
