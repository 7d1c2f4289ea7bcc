"""Shared by the backends whose kernels are jaxgrad's own and compiled by NVRTC for the GPU at hand."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from jaxgrad._src.choice.op import Backend, Rejection
from jaxgrad._src.native import cuda

NO_GPU = "jaxgrad's own kernel is compiled for the GPU of the machine that lowers the program, which has none"


@dataclasses.dataclass(frozen=True)
class Measured:
    """A preference that is a constant of a backend, from measurements, and no row of a table."""

    prefer: str
    why: str

    def __str__(self) -> str:
        return ""  # explanations name rows of tables


class CudaKernelBackend(Backend):
    """CUDA kernels of jaxgrad for one op."""

    implementation = "cuda"
    platform = "cuda"
    title = "CUDA kernels of jaxgrad"
    description = "jaxgrad's own kernel"

    def unavailable(self) -> str:
        return cuda.module_unavailable()

    def rejection_on_gpu(self, pass_name: str, call: Any) -> str:
        """Returns why the kernels do not support a call on the first GPU that JAX uses; empty if they do.

        Asked only where there is a GPU. Raises RuntimeError for a failure of CUDA.
        """
        return ""

    def find_plan(self, pass_name: str, call: Any) -> Rejection | None:
        """Raises RuntimeError for a failure of CUDA in a multi-process program: other processes, in which CUDA works,
        would lower another program."""
        if cuda.gpu_ordinal() is None:
            return Rejection(NO_GPU)
        try:
            if reason := self.rejection_on_gpu(pass_name, call):
                return Rejection(reason)
            reason = cuda.nvrtc_unavailable()
        except RuntimeError as error:
            if jax.process_count() > 1:
                raise
            reason = str(error)
        return self.missing(reason) if reason else None

    def typical_rejection(self, op_name: str, pass_name: str) -> Rejection | None:
        return Rejection(NO_GPU) if cuda.gpu_ordinal() is None else None
