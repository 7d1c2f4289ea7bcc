"""When XLA is faster than a call of cuDNN for a convolution pass.

Measured on an H200 with jax 0.11.2 and cuDNN 9.19, in bfloat16 and float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from jaxgrad._src.selection.features import MATRIX_PRODUCT, ConvFeatures

XLA_ON_PAR = "XLA calls cuDNN for this pass too, is as fast, and fuses the surrounding operations"
_GROUPS_ON_PAR = "the kernels that XLA uses for groups are as fast or much faster"

# XLA takes 8 us to transpose 294912 weights with 1024 output features, and 12 to 70 us for 2359296 with 512; jaxgrad's
# kernel takes 2 and 4 us. With 256 output features or fewer, XLA takes at most 2 us for up to 589824 weights.
_MANY_FEATURES, _MANY_WEIGHTS = 512, 1 << 18
_TENSOR_CORE = 8  # 2-byte features that tensor-core kernels take at a time
_FEW_FEATURES = 8
_FEW_PROBLEMS, _MANY_POSITIONS = 8, 1 << 12
_FEW_MULTIPLICATIONS = 1 << 28  # 8x28x28 positions, 64 to 64 features, a 3x3 window: about 10 us


def prefers_xla(
    pass_name: str, problem: ConvFeatures, *, transposed: bool, kernel_transposes: Callable[[], bool]
) -> str:
    """Returns why XLA is preferred to cuDNN; empty if cuDNN is preferred.

    XLA passes most convolutions on to cuDNN as they are. It is slower in these cases:
      weight gradients   cuDNN writes them with the output features first, and XLA transposes them. In 16 bits, with
                         many weights, the transpose takes as long as the convolution.
      padding            if the padding differs between the two sides, XLA convolves a padded copy.
      stride, dilation   XLA computes weight gradients with a stride or dilation as convolutions with huge windows.
      transposed         XLA does not recognize transposed convolutions.
      3 spatial axes     XLA chooses slower cuDNN kernels.
      small problems     XLA launches each kernel; calls of jaxgrad are recorded into a CUDA graph.
    The exceptions in the code are cases measured to be slower on cuDNN.

    Args:
      pass_name: the pass.
      problem: the convolution.
      transposed: whether the call is the transpose of this convolution.
      kernel_transposes: whether jaxgrad's kernel can transpose the weight gradient. It compiles the kernel, so it is
        called only where the answer matters.
    """
    g = problem.geometry
    asymmetric = any(low != high for low, high in g.padding)
    volume = len(g.w_spatial) == 3
    dilated, strided, grouped = max(g.rhs_dilation) > 1, max(g.window_strides) > 1, g.feature_group_count > 1
    is_16_bit = problem.dtype.itemsize == 2
    if g.is_matrix_product:
        return MATRIX_PRODUCT
    is_1x1 = math.prod(g.w_spatial) == 1  # XLA lowers 1x1 windows to a matrix product
    if not is_1x1 and not grouped and problem.multiplications <= _FEW_MULTIPLICATIONS:
        return ""
    if pass_name == "weight_gradient":
        disjoint = all(k <= stride for k, stride in zip(g.w_spatial, g.window_strides, strict=True))
        if disjoint and is_16_bit and not (transposed or dilated or asymmetric or volume or grouped):
            return "XLA chooses a faster kernel for windows that do not overlap"
        if strided or dilated or asymmetric or (volume and not grouped):
            return ""
        if transpose_is_slow_on_xla(problem) and kernel_transposes():
            return ""
        return _GROUPS_ON_PAR if grouped else XLA_ON_PAR
    if pass_name == "forward":
        if asymmetric or (volume and not grouped):
            return ""
        return "XLA chooses a faster kernel in this dtype" if dilated and not is_16_bit else XLA_ON_PAR
    if grouped:
        several = problem.features != g.feature_group_count
        return "" if dilated or (is_16_bit and several and (asymmetric or strided)) else _GROUPS_ON_PAR
    if transposed:
        return "" if strided or volume or asymmetric else XLA_ON_PAR
    if problem.features < _FEW_FEATURES:
        return "" if volume and is_16_bit else "XLA chooses a faster kernel for few input features"
    return "" if asymmetric or volume else XLA_ON_PAR


def prefers_xla_for_independent_problems(pass_name: str, problem: ConvFeatures) -> bool:
    """Whether XLA is preferred for independent problems, which on cuDNN become groups of one convolution.

    On XLA their weight gradients are matrix products (see conv/xla.py). On an H200 these took 0.1 to 1.3 times as long
    as cuDNN for 16 to 256 problems, but up to 7 times as long for few problems with many positions.
    """
    if pass_name != "weight_gradient" or not problem.num_problems or problem.is_depthwise:
        return False
    positions = problem.batch * math.prod(problem.geometry.y_spatial)
    return math.prod(problem.num_problems) > _FEW_PROBLEMS or positions < _MANY_POSITIONS


def transpose_is_slow_on_xla(problem: ConvFeatures) -> bool:
    """Whether XLA takes long to transpose the weight gradient from cuDNN's layout."""
    features = problem.features // problem.geometry.feature_group_count
    many = problem.out_features >= _MANY_FEATURES and math.prod(problem.w_shape) >= _MANY_WEIGHTS
    # cuDNN pads other feature counts, where XLA may use another kernel.
    aligned = features % _TENSOR_CORE == 0 and problem.out_features % _TENSOR_CORE == 0
    return problem.dtype.itemsize == 2 and math.prod(problem.geometry.w_spatial) > 1 and many and aligned
