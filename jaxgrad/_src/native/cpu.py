"""Loads the compiled CPU module and oneDNN, and registers the CPU handlers.

A missing library does not make the import fail: `unavailable` and `onednn_unavailable` say what is missing.
"""

from __future__ import annotations

import logging
from functools import cache
from typing import Any

from jaxgrad._src.native import onednn
from jaxgrad._src.native.compiled import load, register_handlers

_logger = logging.getLogger("jaxgrad")

module: Any  # jaxgrad._cpu, or None
try:
    module = load("jaxgrad._cpu")
except ImportError as error:
    module, _error = None, f"the compiled module cannot be loaded ({error})"
else:
    _error = ""
    if problem := module.isa_error():
        raise ValueError(f"jaxgrad: {problem}")
    register_handlers(module, "cpu")


def unavailable() -> str:
    """Returns why the CPU kernels cannot be used; empty if they can."""
    return _error


@cache
def onednn_unavailable() -> str:
    """Returns why oneDNN cannot be used; empty if it can. Loads oneDNN at the first call."""
    if module is None:
        return _error
    library, others = find_onednn()
    if library is None:
        return f"oneDNN cannot be loaded ({'; '.join(others)})"
    module.load_onednn(library.path)
    _logger.info("oneDNN %s", "; not used: ".join((str(library), *others)))
    return ""


@cache
def find_onednn() -> onednn.Search:
    """Returns which oneDNN is used, and why others are not. The compiled module must be there."""
    return onednn.find(module)


def targets() -> tuple[str, ...]:
    """Returns the names of the registered CPU handlers."""
    return tuple(sorted(module.registrations())) if module is not None else ()


def build_info() -> dict[str, str]:
    """Returns the FFI API version, compiler, instruction set and oneDNN version of the CPU module."""
    return dict(module.build_info()) if module is not None else {}


# A program that was exported or compiled elsewhere may call a oneDNN handler without any call of an op before.
if _problem := onednn_unavailable():
    _logger.info("CPU kernels: %s", _problem)
