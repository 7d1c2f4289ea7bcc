"""When the weight gradient of a depthwise convolution runs on jaxgrad's own CUDA kernel.

This is the one place that says so; `jaxgrad.explain` tells what it says. The kernel is ffi/cuda/kernels/
depthwise_filter.cu. It is compiled by NVRTC, which comes with JAX's CUDA packages, when a program is lowered that needs
it. It sums in float32, in an order that is always the same, and rounds nothing to TF32.
"""

from __future__ import annotations

from typing import Any

import jax

from jaxgrad import _conv_xla, _ffi
from jaxgrad._conv_geometry import Geometry
from jaxgrad._dispatch import Kernel, Obstacle, Obstacles

_UNIT = "backward_filter"
KERNEL = Kernel(
    "cuda",
    "jaxgrad's own kernel",
    lambda: "",  # told call by call: most have no use for it
    "own CUDA kernels",
    units=(_UNIT,),
    instead="cuDNN or plain XLA",
)
USUAL: Obstacles = {("cuda", _UNIT): Obstacle("jaxgrad's own kernel is for depthwise convolutions")}


def faster_elsewhere(geometry: Geometry, sizes: tuple[int, int, int], dtype: Any) -> str:
    """Why XLA or cuDNN is to be preferred for a depthwise weight gradient; empty where the kernel is the fastest.

    Measured on an H200, jax 0.11.2, cuDNN 9.19.
    """
    return ""


def obstacles(geometry: Geometry, sizes: tuple[int, int, int], dtype: Any, implementation: str | None) -> Obstacles:
    """What stands in the kernel's way in a call of batch, features and output features `sizes`."""
    if implementation not in (None, "cuda"):
        return {}
    _, features, out_features = sizes
    obstacle: Obstacle | None
    if not features == out_features == geometry.feature_group_count:
        obstacle = USUAL["cuda", _UNIT]
    elif not _ffi.cuda_targets():
        obstacle = _missing(_ffi.cuda_problem())
    elif implementation is None and (reason := faster_elsewhere(geometry, sizes, dtype)):
        obstacle = Obstacle(reason, slower=True)
    else:
        obstacle = without_plan(geometry, sizes, dtype)
    return {("cuda", _UNIT): obstacle}


def without_plan(geometry: Geometry, sizes: tuple[int, int, int], dtype: Any) -> Obstacle | None:
    """Why the kernel cannot run, as far as can be said here.

    Raises RuntimeError where it cannot be compiled and other processes, where it can be, wait for the same program.
    """
    try:
        if _ffi.gpu_ordinal() is not None and (problem := _ffi.nvrtc_problem()):
            raise RuntimeError(problem)
        plan = _ffi.cuda_depthwise_plan(geometry, sizes, dtype.name)
    except RuntimeError as error:
        if jax.process_count() > 1:
            raise
        return _missing(str(error))
    return Obstacle(plan) if isinstance(plan, str) else None


def _missing(problem: str) -> Obstacle:
    return Obstacle(f"jaxgrad's {KERNEL.title} are missing: {problem}", missing=problem)


def backward_filter(
    geometry: Geometry, want_bias: bool, x: jax.Array, dy: jax.Array
) -> tuple[jax.Array, jax.Array | None]:
    """(dw, db); XLA sums db."""
    dw = _ffi.cuda_depthwise_filter(geometry, x, dy)
    return dw, _conv_xla.bias_gradient(geometry, dy) if want_bias else None
