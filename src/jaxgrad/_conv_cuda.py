"""When the weight gradient of a depthwise convolution runs on jaxgrad's own CUDA kernel.

This is the one place that says so; `jaxgrad.explain` tells what it says. The kernel is ffi/cuda/kernels/
depthwise_filter.cu. It is compiled by NVRTC, which comes with JAX's CUDA packages, while a gradient is lowered that
needs it. It sums in float32, in an order that is always the same, and rounds nothing to TF32.
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


def obstacles(geometry: Geometry, sizes: tuple[int, int, int], dtype: Any, implementation: str | None) -> Obstacles:
    """What stands in the kernel's way in a call of batch, features and output features `sizes`.

    It is never a faster kernel elsewhere: FIGURES
    """
    if implementation not in (None, "cuda"):
        return {}
    _, features, out_features = sizes
    obstacle: Obstacle | None = None
    if not features == out_features == geometry.feature_group_count:
        obstacle = USUAL["cuda", _UNIT]
    elif not _ffi.cuda_targets():
        obstacle = _missing(_ffi.cuda_problem())
    elif problem := without_plan(geometry, sizes, dtype):
        obstacle = Obstacle(problem)
    elif problem := _ffi.nvrtc_problem():
        obstacle = _missing(problem)
    return {("cuda", _UNIT): obstacle}


def _missing(problem: str) -> Obstacle:
    return Obstacle(f"jaxgrad's {KERNEL.title} are missing: {problem}", missing=problem)


def without_plan(geometry: Geometry, sizes: tuple[int, int, int], dtype: Any) -> str:
    """Why the kernel cannot take a call of batch, features and output features `sizes`; empty where it can."""
    return _ffi.cuda_depthwise_problem(geometry, sizes, dtype.name)


def backward_filter(
    geometry: Geometry, want_bias: bool, x: jax.Array, dy: jax.Array
) -> tuple[jax.Array, jax.Array | None]:
    """(dw, db); XLA sums db."""
    dw = _ffi.cuda_depthwise_filter(geometry, x, dy)
    return dw, _conv_xla.bias_gradient(geometry, dy) if want_bias else None
