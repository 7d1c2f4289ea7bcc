"""Loads the compiled module and oneDNN, and registers the handlers. What is missing is told, not raised."""

from __future__ import annotations

import importlib
import importlib.metadata
from typing import Any

import jax
import jax.numpy as jnp

cpu: Any
try:
    cpu = importlib.import_module("jaxgrad._cpu")
except ImportError as error:
    cpu, _cpu_error = None, f"the compiled module cannot be loaded ({error})"
else:
    _cpu_error = ""
    for _name, _capsule in cpu.registrations().items():
        jax.ffi.register_ffi_target(_name, _capsule, platform="cpu")


def cpu_problem() -> str:
    """Why the CPU kernels cannot be used; empty when they can."""
    return _cpu_error


def cpu_targets() -> tuple[str, ...]:
    """The names of the registered CPU handlers."""
    return tuple(sorted(cpu.registrations())) if cpu is not None else ()


def cpu_build() -> dict[str, str]:
    """What the compiled module says of itself: FFI API version, compiler, the instruction set in use."""
    return dict(cpu.build_info()) if cpu is not None else {}


def _load_onednn() -> str:
    """Opens oneDNN for the compiled module; says what is wrong, or nothing."""
    if cpu is None:
        return _cpu_error
    try:
        files = importlib.metadata.files(_ONEDNN) or []
    except importlib.metadata.PackageNotFoundError:
        return f"oneDNN is not installed (the package {_ONEDNN})"
    for file in files:
        if file.name == "libdnnl.so.3":
            try:
                cpu.load_onednn(str(file.locate()))
            except RuntimeError as error:
                return f"oneDNN cannot be loaded ({error})"
            return ""
    return f"the package {_ONEDNN} has no libdnnl.so.3"


_ONEDNN = "onednn-cpu-gomp"
_onednn_error = _load_onednn()


def onednn_problem() -> str:
    """Why oneDNN's kernels cannot be used; empty when they can."""
    return _onednn_error


def or_empty(array: jax.Array | None, dtype: Any) -> jax.Array:
    return jnp.zeros((0,), dtype) if array is None else array
