"""The CUDA backend of pooling: jaxgrad's kernels in ffi/cuda/pool.

NVRTC, which comes with JAX's CUDA packages, compiles a kernel while a program that needs it is lowered. No kernel uses
atomic operations: sums are in the order of the windows, in float32 for 16-bit dtypes.
"""

from __future__ import annotations

import dataclasses

import jax

from jaxgrad._src.choice.op import Preference, Rejection
from jaxgrad._src.core.jax_internals import cleared_lru_cache
from jaxgrad._src.native import cuda
from jaxgrad._src.pool.handlers import HandlerBackend, attributes, shapes
from jaxgrad._src.pool.params import PoolProblem
from jaxgrad._src.run.plan_directory import plan_directory

_NO_GPU = "jaxgrad's own kernel is compiled for the GPU of the machine that lowers the program, which has none"


@dataclasses.dataclass(frozen=True)
class _Unmeasured:
    """The preference of all calls, in place of a row of a table."""

    prefer: str = "xla"  # unless a tuning has measured the call
    why: str = "jaxgrad's CUDA kernels for pooling run where implementation='cuda' forces them: no GPU has timed them"

    def __str__(self) -> str:
        return ""  # explanations name rows of tables


class CudaBackend(HandlerBackend):
    implementation = "cuda"
    platform = "cuda"
    title = "CUDA kernels of jaxgrad"
    description = "jaxgrad's own kernel"

    def unavailable(self) -> str:
        return cuda.module_unavailable()

    def supports_sizes(self, number: int, problem: PoolProblem) -> Rejection | None:
        if self.unavailable():
            return None
        reason = _rejection(number, problem)
        return Rejection(reason) if reason else None

    def row(self, pass_name: str, call: PoolProblem, *, resized: bool = False) -> Preference:
        return _Unmeasured()

    def find_plan(self, pass_name: str, call: PoolProblem) -> Rejection | None:
        """Raises RuntimeError for a failure of CUDA in a multi-process program: other processes, in which CUDA works,
        would lower another program."""
        if cuda.gpu_ordinal() is None:
            return Rejection(_NO_GPU)
        try:
            reason = cuda.nvrtc_unavailable()
        except RuntimeError as error:
            if jax.process_count() > 1:
                raise
            reason = str(error)
        return self.missing(reason) if reason else None

    def typical_rejection(self, op_name: str, pass_name: str) -> Rejection | None:
        return Rejection(_NO_GPU) if cuda.gpu_ordinal() is None else Rejection(_Unmeasured.why, slower=True)

    def workspace(self, number: int, problem: PoolProblem) -> int:
        return _load(number, problem)


@cleared_lru_cache(4096)
def _rejection(number: int, problem: PoolProblem) -> str:
    dtype = cuda.float_type(problem.dtype)
    return str(cuda.module.pool_rejection(number, dtype, *shapes(problem), **attributes(problem), divisor=problem.divisor))


@cleared_lru_cache(4096)
@plan_directory()
def _load(number: int, problem: PoolProblem) -> int:
    """Compiles the kernels of a call for the first GPU that JAX uses, and returns the bytes of workspace."""
    dtype = cuda.float_type(problem.dtype)
    device = cuda.gpu_ordinal()
    return int(cuda.module.load_pool_kernels(device, number, dtype, *shapes(problem), **attributes(problem), divisor=problem.divisor))
