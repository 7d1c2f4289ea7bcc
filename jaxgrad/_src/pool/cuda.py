"""The CUDA backend of pooling: jaxgrad's kernels in ffi/cuda/pool.

NVRTC, which comes with JAX's CUDA packages, compiles a kernel while a program that needs it is lowered. No kernel uses
atomic operations: sums are in the order of the windows, in float32 for 16-bit dtypes.
"""

from __future__ import annotations

import math

from jaxgrad._src.choice.op import Preference, Rejection
from jaxgrad._src.core.jax_internals import cleared_lru_cache
from jaxgrad._src.native import cuda
from jaxgrad._src.pool.handlers import HandlerBackend, attributes, shapes
from jaxgrad._src.pool.params import PoolProblem
from jaxgrad._src.run.cuda_kernels import CudaKernelBackend, Measured
from jaxgrad._src.run.plan_directory import plan_directory

_MAX_ELEMENTS = 32  # of windows; of larger ones, XLA splits the sums and maxima over more threads
# Where a forward pass reads each element of x so often, XLA is slower. Elsewhere it is as fast, and may fuse the pass.
_MIN_READS, _MIN_READS_OF_16_BITS = 9, 2
_MIN_BYTES = 8  # of neighboring channels, which a thread of a forward pass loads at a time


# From measurements on an H200 of windows of up to 25 elements.
_OURS = Measured("cuda", "jaxgrad's kernels are faster")
_LARGE_WINDOWS = Measured("xla", f"XLA is faster for windows of more than {_MAX_ELEMENTS} elements")
_AS_FAST = Measured("xla", "XLA is as fast in forward passes of pooling whose windows share few elements")
_APART = Measured("xla", "XLA is as fast in gradients of sums, channels first, of windows that do not overlap")


class CudaBackend(CudaKernelBackend, HandlerBackend):
    def supports_sizes(self, number: int, problem: PoolProblem) -> Rejection | None:
        if self.unavailable():
            return None
        reason = _rejection(number, problem)
        return Rejection(reason) if reason else None

    def row(self, pass_name: str, call: PoolProblem, *, resized: bool = False) -> Preference:
        window = call.window
        if call.op == "max_pool" and pass_name != "forward" and any(dilation > 1 for dilation in window.dilation):
            return _OURS  # XLA has no such gradient: a loop over the elements of a window computes it
        if math.prod(window.shape) > _MAX_ELEMENTS:
            return _LARGE_WINDOWS
        reads = math.prod(window.shape) / math.prod(window.strides)
        if pass_name == "forward":
            is_wide = call.dtype.itemsize > 2
            vector = math.gcd(call.shape[-1], 8) * call.dtype.itemsize if window.channels_last else 0
            enough = reads >= (_MIN_READS if is_wide else _MIN_READS_OF_16_BITS)
            return _OURS if enough and vector >= _MIN_BYTES else _AS_FAST
        if call.op == "avg_pool" and not window.channels_last and reads <= 1:
            return _APART
        return _OURS

    def typical_rejection(self, op_name: str, pass_name: str) -> Rejection | None:
        as_fast = Rejection(_AS_FAST.why, slower=True) if pass_name == "forward" else None
        return super().typical_rejection(op_name, pass_name) or as_fast

    def workspace(self, number: int, problem: PoolProblem) -> int:
        return _load(number, problem)


@cleared_lru_cache(4096)
def _rejection(number: int, problem: PoolProblem) -> str:
    dtype = cuda.float_type(problem.dtype)
    return str(
        cuda.module.pool_rejection(number, dtype, *shapes(problem), **attributes(problem), divisor=problem.divisor)
    )


@cleared_lru_cache(4096)
@plan_directory()
def _load(number: int, problem: PoolProblem) -> int:
    """Compiles the kernels of a call for the first GPU that JAX uses, and returns the bytes of workspace."""
    dtype = cuda.float_type(problem.dtype)
    device = cuda.gpu_ordinal()
    return int(
        cuda.module.load_pool_kernels(
            device, number, dtype, *shapes(problem), **attributes(problem), divisor=problem.divisor
        )
    )
