"""The backends of pooling. A new backend is registered here, and nowhere else."""

from __future__ import annotations

from jaxgrad._src.pool.backend import PoolBackend
from jaxgrad._src.pool.cpu import CpuBackend
from jaxgrad._src.pool.cuda import CudaBackend

BACKENDS: tuple[PoolBackend, ...] = (CpuBackend(), CudaBackend())
