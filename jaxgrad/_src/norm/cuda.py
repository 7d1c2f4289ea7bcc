"""The CUDA backend of normalization: jaxgrad's kernels in ffi/cuda/norm.

A pass is one launch. The blocks of the GPU keep their part of x in registers and shared memory, exchange their sums,
and compute the result from what they have kept; what does not fit is read again. NVRTC, which comes with JAX's CUDA
packages, compiles the kernels. Sums are float32, in a fixed order.
"""

from __future__ import annotations

import contextlib
import dataclasses
from concurrent.futures import ThreadPoolExecutor
from functools import cache

from jaxgrad._src.choice.op import Preference, Rejection
from jaxgrad._src.core.jax_internals import cleared_lru_cache
from jaxgrad._src.native import cuda
from jaxgrad._src.norm.handlers import HandlerBackend, Kernel, kernel_of
from jaxgrad._src.norm.params import NormProblem
from jaxgrad._src.run.cuda_kernels import CudaKernelBackend, Measured
from jaxgrad._src.run.plan_directory import plan_directory

_TYPICAL_GPU = -1
_COMPILING_THREADS = 4
_NAMES = ("forward", "statistics", "normalize", "backward")  # by the number of the pass, see ffi/cuda/norm/plan.h


_OURS = Measured("cuda", "jaxgrad's kernels are faster")
# The blocks take samples in turn, and a turn takes some microseconds at least: an estimate.
_MANY_SAMPLES, _SMALL_BYTES = 512, 1 << 15
_SMALL = Measured("xla", "XLA is faster for many small samples")


class CudaBackend(CudaKernelBackend, HandlerBackend):
    target = "jaxgrad_cuda_norm"

    def supports(self, pass_name: str, call: NormProblem) -> Rejection | None:
        if not call.size:
            return self.missing()
        if self.unavailable():
            return None
        reason = _rejection(_TYPICAL_GPU, kernel_of(call, pass_name))
        return Rejection(reason) if reason else None

    def supports_steps(self, call: NormProblem) -> bool:
        if self.unavailable():
            return True
        statistics = dataclasses.replace(kernel_of(call, "forward"), name="statistics")
        return not _rejection(_TYPICAL_GPU, statistics)

    def row(self, pass_name: str, call: NormProblem, *, resized: bool = False) -> Preference:
        sample = call.outer * call.channels * call.inner * call.dtype.itemsize
        if not call.is_rows and call.calls * call.samples > _MANY_SAMPLES and sample < _SMALL_BYTES:
            return _SMALL
        return _OURS

    def rejection_on_gpu(self, pass_name: str, call: NormProblem) -> str:
        return _rejection(cuda.gpu_ordinal(), kernel_of(call, pass_name)) if call.size else ""

    def supports_resized(self, pass_name: str, call: NormProblem) -> bool:
        return super().supports_resized(pass_name, call) and self.find_plan(pass_name, call) is None

    def workspace(self, kernel: Kernel) -> int:
        return _workspace(kernel)


def _arguments(kernel: Kernel) -> tuple[object, ...]:
    return (
        _NAMES.index(kernel.name),
        cuda.float_type(kernel.dtype),
        list(kernel.sizes),
        kernel.activation,
        kernel.centered,
        kernel.frozen,
        kernel.residual,
        kernel.third,
        kernel.needs_dx,
        kernel.needs_sums,
    )


@cleared_lru_cache(4096)
def _rejection(device: int | None, kernel: Kernel) -> str:
    return str(cuda.module.norm_rejection(device, *_arguments(kernel)))


@cleared_lru_cache(4096)
def _workspace(kernel: Kernel) -> int:
    """Returns the bytes of workspace of a kernel on the first GPU that JAX uses, and starts compiling it.

    NVRTC takes seconds. It runs while XLA compiles the program. The first call compiles a kernel that is not ready yet,
    and raises what kept it from being compiled.
    """
    device, arguments = cuda.gpu_ordinal(), _arguments(kernel)
    assert device is not None  # find_plan
    with contextlib.suppress(RuntimeError):  # the interpreter is about to exit
        _compiling().submit(_load, device, arguments)
    return int(cuda.module.norm_workspace(device, *arguments))


@plan_directory()
def _load(device: int, arguments: tuple[object, ...]) -> None:
    cuda.module.load_norm_kernel(device, *arguments)


@cache
def _compiling() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_COMPILING_THREADS, "jaxgrad_nvrtc")
