"""The directory in which cuDNN's plans and compiled CUDA kernels are kept: the setting `plan_cache_dir`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import cache

from jaxgrad._src.choice.settings import use_plan_directory
from jaxgrad._src.core.warn import warn_caller
from jaxgrad._src.native import cuda


@contextlib.contextmanager
def plan_directory() -> Iterator[None]:
    """To make a plan or compile a kernel in. Warns once if it could not be kept."""
    use_plan_directory()
    yield
    if error := cuda.module.plan_directory_error():
        _warn_once(cuda.module.plan_directory(), error)


@cache
def _warn_once(path: str, error: str) -> None:
    warn_caller(
        f"jaxgrad cannot write to its directory {path!r}, and will time plans and compile kernels again in the next "
        f"process: {error}",
        RuntimeWarning,
    )
