"""Transposes a weight gradient from cuDNN's layout to the caller's with jaxgrad's CUDA kernel.

XLA's transposes of 2-byte elements take several times as long. ffi/cuda/transpose decides which transposes the kernel
takes; the others stay with XLA.
"""

from __future__ import annotations

from functools import cache

from jaxgrad._src.conv.call.geometry import ConvGeometry
from jaxgrad._src.conv.call.problem import ConvProblem
from jaxgrad._src.native import cuda
from jaxgrad._src.run.plan_directory import plan_directory


def kernel_transposes(problem: ConvProblem, written: ConvGeometry) -> bool:
    """Whether jaxgrad's kernel brings dw from the layout that cuDNN writes to the caller's layout, in the same call.

    Args:
      problem: the convolution in the caller's layouts. Its window is reversed on the way if the geometry says so.
      written: the geometry whose layout cuDNN writes.

    Without a GPU on this machine the answer is no: whether NVRTC, which compiles the kernel, is installed where the
    program runs is unknown.
    """
    device = cuda.gpu_ordinal()
    if device is None:
        return False
    geometry = problem.geometry
    sizes = (problem.out_features, problem.features // geometry.feature_group_count, *geometry.w_spatial)
    reversed_axes = list(range(2, len(sizes))) if geometry.window_reversed else []
    specs = list(written.rhs_spec), list(geometry.rhs_spec)
    if not cuda.module.transpose_supported(list(sizes), *specs, reversed_axes):
        return False
    return not transpose_unavailable(device)  # asked last, because it compiles the kernel


@cache
@plan_directory()
def transpose_unavailable(device: int) -> str:
    """Returns why the kernel cannot run on a GPU; empty if it can, and then it is compiled and loaded there.

    Raises:
      RuntimeError: an error that may pass, for instance because the GPU's memory is full. It is not remembered. Other
        processes of the program may not have it, and would lower another program.
    """
    return cuda.nvrtc_unavailable() or str(cuda.module.load_transpose_kernels(device))
