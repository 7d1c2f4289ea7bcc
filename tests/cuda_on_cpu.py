"""Runs the handlers of the CUDA module in programs for the CPU, where jaxgrad then takes the CPU for a GPU."""

from __future__ import annotations

import ctypes
from typing import Any

import jax

from jaxgrad._src.conv.kernels.cudnn import CudnnBackend
from jaxgrad._src.conv.kernels.depthwise_cuda import DepthwiseCudaBackend
from jaxgrad._src.gru.cuda import CudaBackend as GruBackend
from jaxgrad._src.native import cuda
from jaxgrad._src.norm.cuda import CudaBackend as NormBackend
from jaxgrad._src.norm.cudnn import CudnnBackend as BatchNormBackend
from jaxgrad._src.pool.cuda import CudaBackend as PoolBackend


def register(library: Any) -> None:
    """Registers the handlers for the CPU. The library is built from a file that includes handler_slots.h."""
    pointer, capsule = ctypes.pythonapi.PyCapsule_GetPointer, ctypes.pythonapi.PyCapsule_New
    pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    capsule.restype, capsule.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    through_call = library.handler_through_call
    through_call.restype, through_call.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
    for name, handler in cuda.module.registrations().items():
        wrapped = capsule(through_call(pointer(handler, None)), None, None)
        jax.ffi.register_ffi_target(name, wrapped, platform="cpu")
    for backend in (CudnnBackend, BatchNormBackend, DepthwiseCudaBackend, GruBackend, NormBackend, PoolBackend):
        backend.platform = "cpu"
    cuda.gpu_ordinal = lambda: 0
