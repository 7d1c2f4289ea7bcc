"""The backends of the GRU. A new backend is registered here, and nowhere else."""

from __future__ import annotations

from jaxgrad._src.gru.backend import GruBackend
from jaxgrad._src.gru.cpu import CpuBackend
from jaxgrad._src.gru.cuda import CudaBackend

BACKENDS: tuple[GruBackend, ...] = (CpuBackend(), CudaBackend())
