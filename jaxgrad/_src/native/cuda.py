"""Loads the compiled module and oneDNN, and registers the handlers. What is missing is told, not raised."""

from __future__ import annotations

import importlib
import importlib.metadata
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp

from jaxgrad._version import __version__

cpu: Any
try:
    cpu = importlib.import_module("jaxgrad._cpu")
except ImportError as error:
    cpu, _cpu_error = None, f"the compiled module cannot be loaded ({error})"
else:
    _cpu_error = ""
    for _name, _capsule in cpu.registrations().items():
        jax.ffi.register_ffi_target(_name, _capsule, platform="cpu")


cuda: Any
try:
    cuda = importlib.import_module("jaxgrad._cuda")
except ImportError as error:
    cuda = None
    _cuda_error = f"this build of jaxgrad has no CUDA module, or it cannot be loaded ({error})"
else:
    _cuda_error = ""
    for _name, _capsule in cuda.registrations().items():
        jax.ffi.register_ffi_target(_name, _capsule, platform="CUDA")


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


def cuda_targets() -> tuple[str, ...]:
    """The names of the registered CUDA handlers."""
    return tuple(sorted(cuda.registrations())) if cuda is not None else ()


def cuda_build() -> dict[str, str]:
    """What the CUDA module says of itself: FFI API version, compiler, the cuDNN it was built for and the one in use."""
    return dict(cuda.build_info()) if cuda is not None else {}


@cache
def builds() -> tuple[Any, ...]:
    """What a compiled program depends on beside its text: the releases of jaxgrad and of the library that it calls, and
    on a CPU the instruction set. All hosts of a computation on GPUs have the same."""
    return __version__, cpu_build() if gpu_ordinal() is None else cudnn_problem() or cuda_build()["cudnn"]


@cache
def gpu_ordinal() -> int | None:
    """CUDA's number of the first GPU that JAX uses, or None where it uses none."""
    try:
        return int(jax.local_devices(backend="cuda")[0].local_hardware_id)
    except (RuntimeError, IndexError):
        return None


def cuda_problem() -> str:
    """Why a call cannot be lowered for cuDNN's kernels; empty when it can.

    Where JAX uses no GPU this asks for the module alone: what is lowered here runs elsewhere.
    """
    return _cuda_error if cuda is None or gpu_ordinal() is None else cudnn_problem()


@cache
def cudnn_problem() -> str:
    """Why cuDNN's kernels cannot run here; empty when they can. Opens cuDNN at its first call."""
    if cuda is None:
        return _cuda_error
    try:
        cuda.load_cudnn(_libraries(_CUDNN_PACKAGES, ("libcudnn.so.9",)))
    except RuntimeError as error:
        return str(error)
    return ""


@cache
def nvrtc_problem() -> str:
    """Why jaxgrad's own kernels cannot be compiled here; empty when they can. Opens NVRTC at its first call."""
    if cuda is None:
        return _cuda_error
    try:
        cuda.load_nvrtc(_libraries(_NVRTC_PACKAGES, ("libnvrtc.so.13", "libnvrtc.so.12")))
        if (device := gpu_ordinal()) is not None:
            cuda.check_nvrtc(device)
    except RuntimeError as error:
        return str(error)
    return ""


def _libraries(packages: tuple[str, ...], names: tuple[str, ...]) -> list[str]:
    """The paths of the libraries that the installed ones of the packages hold."""
    found = []
    for package in packages:
        try:
            files = importlib.metadata.files(package) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        found += [str(file.locate()) for file in files if file.name in names]
    return found


# Used where JAX has not opened these libraries yet.
_CUDNN_PACKAGES = ("nvidia-cudnn-cu13", "nvidia-cudnn-cu12")
_NVRTC_PACKAGES = ("nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu12")


def or_empty(array: jax.Array | None, dtype: Any) -> jax.Array:
    return jnp.zeros((0,), dtype) if array is None else array
