"""What a compiled program depends on beside its text."""

from __future__ import annotations

from functools import cache
from typing import Any

from jaxgrad._src.native import cpu, cuda
from jaxgrad._src.version import __version__


@cache
def library_fingerprint() -> tuple[Any, ...]:
    """Returns the versions of jaxgrad and of the library behind its handlers, the same on all hosts of a program.

    On a GPU the library is cuDNN. On a CPU it is the compiled module, with its instruction set and oneDNN.
    """
    on_gpu = cuda.gpu_ordinal() is not None
    library = (cuda.cudnn_unavailable() or cuda.build_info()["cudnn"]) if on_gpu else cpu.build_info()
    return __version__, library
