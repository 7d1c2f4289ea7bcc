"""The CPU backend of pooling: jaxgrad's C++ kernels in ffi/cpu/pool.

The gradient of max pooling is added in the order of the windows, and each sum is rounded to the dtype of x, as XLA
does, so that results have the same bits. Sums of average pooling are float32 for 16-bit dtypes. No result depends on
the number of threads.
"""

from __future__ import annotations

from jaxgrad._src.choice.op import Rejection
from jaxgrad._src.core.jax_internals import cleared_lru_cache
from jaxgrad._src.native import cpu
from jaxgrad._src.pool.handlers import HandlerBackend, attributes, shapes
from jaxgrad._src.pool.params import PoolProblem


class CpuBackend(HandlerBackend):
    implementation = "cpu"
    platform = "cpu"
    title = "CPU kernels"
    description = "jaxgrad's own kernel"

    def unavailable(self) -> str:
        return cpu.unavailable()

    def supports_sizes(self, number: int, problem: PoolProblem) -> Rejection | None:
        if self.unavailable():
            return None
        try:
            _workspace(number, problem)
        except ValueError as error:  # sizes near 2^62
            return Rejection(f"the CPU kernels take smaller sizes: {error}")
        return None

    def workspace(self, number: int, problem: PoolProblem) -> int:
        return _workspace(number, problem)


@cleared_lru_cache(4096)
def _workspace(number: int, problem: PoolProblem) -> int:
    """The bytes of workspace of a call, for the threads of this machine."""
    sizes = problem.dtype.itemsize
    return int(cpu.module.pool_workspace(number, *shapes(problem), **attributes(problem), storage_bytes=sizes))
