"""The backends of batch normalization. A new backend is registered here, and nowhere else."""

from __future__ import annotations

from jaxgrad._src.batch_norm.backend import BatchNormBackend, TwoStepBackend
from jaxgrad._src.batch_norm.cpu import CpuBackend
from jaxgrad._src.batch_norm.cudnn import CudnnBackend

BACKENDS: tuple[BatchNormBackend, ...] = (CpuBackend(), CudnnBackend())

# Those of `batch_norm_inference`, of statistics of several devices and of forward mode.
TWO_STEP_BACKENDS: tuple[TwoStepBackend, ...] = tuple(b for b in BACKENDS if isinstance(b, TwoStepBackend))
