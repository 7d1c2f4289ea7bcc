"""When XLA or cuDNN is faster than jaxgrad's CUDA kernel for a depthwise weight gradient."""

from __future__ import annotations

import math

from jaxgrad._src.selection.features import ConvFeatures

_FEW_TAPS = 25


def prefers_other(problem: ConvFeatures) -> str:
    """Returns why XLA or cuDNN is preferred; empty if the kernel is preferred.

    In channels-last layouts the kernel is always preferred. On an H200 (jax 0.11.2, cuDNN 9.19) XLA, which tries
    cuDNN's kernels too, took 1.3 to 80 times as long: all depthwise layers of MobileNetV2 and ConvNeXt in float32 and
    bfloat16; in float32 windows of 3 to 31, strides 1 and 2, 8 to 960 channels, batches of 1 to 64. In other layouts x
    and dy are transposed first, which takes longer than the kernel. That pays where XLA takes milliseconds: large or
    dilated windows in float32.
    """
    g = problem.geometry
    last = len(g.lhs_spec) - 1
    if g.lhs_spec[1] == g.out_spec[1] == last and g.lhs_spec[0] == g.out_spec[0] == 0:
        return ""
    is_slow_on_xla = problem.dtype.name == "float32" and (math.prod(g.w_spatial) > _FEW_TAPS or max(g.rhs_dilation) > 1)
    if is_slow_on_xla:
        return ""
    return "the transposes to channels last, which jaxgrad's kernel needs, take longer than the kernel saves"
