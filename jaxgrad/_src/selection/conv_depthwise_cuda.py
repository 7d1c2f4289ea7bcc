"""When the weight gradient of a depthwise convolution runs on jaxgrad's own CUDA kernel.

This is the one place that says so; `jaxgrad.explain` tells what it says. The kernel is ffi/cuda/kernels/
depthwise_filter.cu. It is compiled by NVRTC, which comes with JAX's CUDA packages, while a gradient is lowered that
needs it. It sums in float32, in an order that is always the same, and rounds nothing to TF32.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from jaxgrad import _conv_xla, _ffi
from jaxgrad._conv_geometry import Geometry
from jaxgrad._conv_problem import Problem
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


def faster_elsewhere(problem: Problem) -> str:
    """Why XLA or cuDNN is to be preferred for a depthwise weight gradient; empty where the kernel is.

    With channels last it always is. On an H200 (jax 0.11.2, cuDNN 9.19) XLA's choice, cuDNN's kernels among them, took
    1.3 to 80 times as long: MobileNetV2's and ConvNeXt's in float32 and bfloat16, and in float32 windows of 3 to 31,
    strides of 1 and 2, 8 to 960 channels, batches of 1 to 64. Of other layouts x and dy are transposed first, which
    takes longer than the kernel does: that pays where XLA takes milliseconds, for large or dilated windows in float32.
    """
    g = problem.geometry
    last = len(g.lhs_spec) - 1
    if g.lhs_spec[1] == g.out_spec[1] == last and g.lhs_spec[0] == g.out_spec[0] == 0:
        return ""
    slow = problem.dtype == jnp.float32 and (math.prod(g.w_spatial) > _FEW_TAPS or max(g.rhs_dilation) > 1)
    return (
        "" if slow else "jaxgrad's own kernel takes channels last, and to bring them there takes longer than it saves"
    )


_FEW_TAPS = 25


def obstacles(problem: Problem, implementation: str | None) -> Obstacles:
    """What stands in the kernel's way in a call."""
    if implementation not in (None, "cuda"):
        return {}
    obstacle: Obstacle | None = None
    if not problem.is_depthwise:
        obstacle = USUAL["cuda", _UNIT]
    elif not _ffi.cuda_targets():
        obstacle = _missing(_ffi.cuda_problem())
    elif implementation is None and (reason := faster_elsewhere(problem)):
        obstacle = Obstacle(reason, slower=True)
    elif reason := _ffi.cuda_depthwise_problem(problem):
        obstacle = Obstacle(reason)
    elif reason := _ffi.nvrtc_problem():
        obstacle = _missing(reason)
    return {("cuda", _UNIT): obstacle}


def _missing(reason: str) -> Obstacle:
    return Obstacle(f"jaxgrad's {KERNEL.title} are missing: {reason}", missing=reason)


def backward_filter(
    geometry: Geometry, want_bias: bool, x: jax.Array, dy: jax.Array
) -> tuple[jax.Array, jax.Array | None]:
    """(dw, db); XLA sums db."""
    dw = _ffi.cuda_depthwise_filter(geometry, x, dy)
    return dw, _conv_xla.bias_gradient(geometry, dy) if want_bias else None
