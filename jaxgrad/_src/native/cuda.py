"""Loads the compiled CUDA module, cuDNN and NVRTC, and registers the CUDA handlers.

A missing library does not make the import fail: the functions below say what is missing. cuDNN and NVRTC are loaded at
first use.
"""

from __future__ import annotations

import logging
import re
from functools import cache
from typing import Any

import jax

from jaxgrad._src.native.compiled import load, register_handlers
from jaxgrad._src.native.libraries import library_paths

_logger = logging.getLogger("jaxgrad")

module: Any  # jaxgrad._cuda, or None
try:
    module = load("jaxgrad._cuda")
except ImportError as error:
    module = None
    _error = f"this build of jaxgrad has no CUDA module, or it cannot be loaded ({error})"
else:
    _error = ""
    register_handlers(module, "CUDA")

# Searched where JAX has not loaded these libraries yet.
_CUDNN_PACKAGES = ("nvidia-cudnn-cu13", "nvidia-cudnn-cu12")
_NVRTC_PACKAGES = ("nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu12")
_FLOAT_TYPES = ("float32", "float64", "bfloat16", "float16")  # FloatType in ffi/cuda


def float_type(dtype: Any) -> int:
    """Returns the number of a dtype in the CUDA module."""
    return _FLOAT_TYPES.index(dtype.name)


def targets() -> tuple[str, ...]:
    """Returns the names of the registered CUDA handlers."""
    return tuple(sorted(module.registrations())) if module is not None else ()


def build_info() -> dict[str, str]:
    """Returns the FFI API version and compiler of the CUDA module, and the cuDNN and NVRTC versions."""
    return dict(module.build_info()) if module is not None else {}


@cache
def gpu_ordinal() -> int | None:
    """Returns CUDA's number of the first GPU that JAX uses, or None."""
    try:
        return int(jax.local_devices(backend="cuda")[0].local_hardware_id)
    except (RuntimeError, IndexError):
        return None


@cache
def device_kind() -> str | None:
    """Returns JAX's name of the kind of the first GPU that it uses, or None."""
    try:
        return str(jax.local_devices(backend="cuda")[0].device_kind)
    except (RuntimeError, IndexError):
        return None


@cache
def compute_capability() -> tuple[int, int] | None:
    """Returns the compute capability of the first GPU that JAX uses; None if there is none, or JAX does not know it."""
    try:
        device = jax.local_devices(backend="cuda")[0]
    except (RuntimeError, IndexError):
        return None
    found = re.match(r"(\d+)\.(\d+)", getattr(device, "compute_capability", ""))
    return (int(found[1]), int(found[2])) if found else None


def use_plan_directory(path: str) -> None:
    """Sets the directory in which cuDNN's plans and compiled kernels are kept; empty for none."""
    if module is not None and path != module.plan_directory():
        module.use_plan_directory(path)


def unavailable() -> str:
    """Returns why a call cannot be lowered to cuDNN; empty if it can.

    Without a GPU on this machine only the CUDA module is required: the program will run elsewhere.
    """
    return _error if module is None or gpu_ordinal() is None else cudnn_unavailable()


def module_unavailable() -> str:
    """Returns why the CUDA module cannot be used; empty if it can. jaxgrad's kernels also need NVRTC."""
    return _error


@cache
def cudnn_unavailable() -> str:
    """Returns why cuDNN cannot run on this machine; empty if it can. Loads cuDNN at the first call."""
    if module is None:
        return _error
    try:
        module.load_cudnn(library_paths(_CUDNN_PACKAGES, ("libcudnn.so.9",)) or [])
    except RuntimeError as error:
        return str(error)
    _logger.info("cuDNN %s", module.build_info()["cudnn"])
    return ""


@cache
def nvrtc_unavailable() -> str:
    """Returns why CUDA kernels cannot be compiled on this machine; empty if they can. Loads NVRTC at the first call.

    Raises:
      RuntimeError: an error that may pass, for instance because memory is full. It is not remembered.
    """
    if module is None:
        return _error
    return str(module.nvrtc_problem(nvrtc_paths(), gpu_ordinal()))


def nvrtc_paths() -> list[str]:
    """Returns where the packages of JAX have NVRTC; empty if they have none."""
    return library_paths(_NVRTC_PACKAGES, ("libnvrtc.so.13", "libnvrtc.so.12")) or []
