"""Loads the compiled CPU module and oneDNN, and registers the CPU handlers.

A missing library does not make the import fail: `unavailable` and `onednn_unavailable` say what is missing.
"""

from __future__ import annotations

import importlib
from functools import cache
from typing import Any

import jax

from jaxgrad._src.native.libraries import library_paths

module: Any  # jaxgrad._cpu, or None
try:
    module = importlib.import_module("jaxgrad._cpu")
except ImportError as error:
    module, _error = None, f"the compiled module cannot be loaded ({error})"
else:
    _error = ""
    if problem := module.isa_error():
        raise ValueError(f"jaxgrad: {problem}")
    for _name, _capsule in module.registrations().items():
        jax.ffi.register_ffi_target(_name, _capsule, platform="cpu")

_ONEDNN_PACKAGE, _ONEDNN_LIBRARY = "onednn-cpu-gomp", "libdnnl.so.3"


def unavailable() -> str:
    """Returns why the CPU kernels cannot be used; empty if they can."""
    return _error


@cache
def onednn_unavailable() -> str:
    """Returns why oneDNN cannot be used; empty if it can. Loads oneDNN at the first call."""
    if module is None:
        return _error
    paths = library_paths((_ONEDNN_PACKAGE,), (_ONEDNN_LIBRARY,))
    if paths is None:
        return f"oneDNN is not installed (the package {_ONEDNN_PACKAGE})"
    if not paths:
        return f"the package {_ONEDNN_PACKAGE} has no {_ONEDNN_LIBRARY}"
    try:
        module.load_onednn(paths[0])
    except RuntimeError as error:
        return f"oneDNN cannot be loaded ({error})"
    return ""


def targets() -> tuple[str, ...]:
    """Returns the names of the registered CPU handlers."""
    return tuple(sorted(module.registrations())) if module is not None else ()


def build_info() -> dict[str, str]:
    """Returns the FFI API version, compiler, instruction set and oneDNN version of the CPU module."""
    return dict(module.build_info()) if module is not None else {}


# A program that was exported or compiled elsewhere may call a oneDNN handler without any call of an op before.
onednn_unavailable()
