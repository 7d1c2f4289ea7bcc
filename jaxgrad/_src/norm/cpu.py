"""The CPU backend of normalization: jaxgrad's C++ kernels in ffi/cpu/norm, which support every call.

The kernels merge blocks whose size and order are fixed, so that results do not depend on the number of threads.
"""

from __future__ import annotations

from jaxgrad._src.native import cpu
from jaxgrad._src.norm.handlers import HandlerBackend, Kernel


class CpuBackend(HandlerBackend):
    implementation = "cpu"
    platform = "cpu"
    title = "CPU kernels"
    description = "the CPU kernel supports every dtype and shape of this op"
    target = "jaxgrad_cpu_norm"

    def unavailable(self) -> str:
        return cpu.unavailable()

    def workspace(self, kernel: Kernel) -> int:
        return int(cpu.module.norm_workspace(*kernel.sizes, kernel.dtype.itemsize))
