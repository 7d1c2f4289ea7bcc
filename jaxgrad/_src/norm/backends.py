"""The backends of normalization. A new backend is registered here, and nowhere else."""

from __future__ import annotations

from jaxgrad._src.norm.backend import NormBackend, TwoStepBackend
from jaxgrad._src.norm.cpu import CpuBackend
from jaxgrad._src.norm.cuda import CudaBackend
from jaxgrad._src.norm.cudnn import CudnnBackend

BACKENDS: tuple[NormBackend, ...] = (CpuBackend(), CudaBackend(), CudnnBackend())

# For `batch_norm_inference`, samples, statistics of several devices and forward mode.
TWO_STEP_BACKENDS: tuple[TwoStepBackend, ...] = tuple(b for b in BACKENDS if isinstance(b, TwoStepBackend))
