"""The directory of `plan_cache_dir`, in which cuDNN's plans and compiled CUDA kernels are kept."""

from __future__ import annotations

from functools import cache

from jaxgrad._src.core.settings import current
from jaxgrad._src.core.warn import warn_caller
from jaxgrad._src.native import cuda


def warn_if_not_writable() -> None:
    """Warns once if a plan or kernel could not be kept. To be called after one was made."""
    if error := cuda.module.plan_directory_error():
        _warn_once(current().plan_cache_dir, error)


@cache
def _warn_once(path: str | None, error: str) -> None:
    warn_caller(
        f"jaxgrad cannot write to plan_cache_dir={path!r}, and will time plans and compile kernels again in the next "
        f"process: {error}",
        RuntimeWarning,
    )
