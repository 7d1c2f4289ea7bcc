"""When a unit of the triangle runs on cuDNN: what cuDNN can take, and where XLA is known to be as fast.

This is the one place that says so; `jaxgrad.explain` tells what it says.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

import jax

from jaxgrad import _conv_problem, _conv_xla, _ffi, config
from jaxgrad._conv_geometry import Geometry
from jaxgrad._conv_problem import Problem
from jaxgrad._dispatch import Kernel, Obstacle, Obstacles

KERNEL = Kernel("cudnn", "cuDNN", _ffi.cuda_problem, "cuDNN kernels")

_LEVEL = "XLA runs this unit on cuDNN itself, as fast, and fuses what stands around it"
_GROUPS = "XLA's kernels for groups are as fast, and at times much faster"


def faster_on_xla(kind: str, problem: Problem, transposed: bool) -> str:
    """Why XLA is to be preferred for a unit; empty where cuDNN called from here is the faster.

    XLA hands most convolutions to cuDNN as they are, but transposes the weight gradient, which cuDNN writes with the
    output features first: in 16 bits, of many weights, that takes it as long as the convolution. It does not hand over
    those whose padding is not the same on either side, of which it makes a padded copy; weight gradients with stride
    or dilation, which it computes as plain convolutions with huge windows; and transposed convolutions, whose form it
    does not recognise. With three spatial axes its choice of kernels is worse throughout. Small convolutions cost it
    the launch of each, where calls from here are recorded into a CUDA graph. Measured on an H200, jax 0.11.2, cuDNN
    9.19, in bfloat16 and float32; the exceptions below are cases measured to be slower on cuDNN.

    Args:
      kind: the unit.
      problem: the convolution.
      transposed: the convolution is the one that a transposed convolution transposes.
    """
    g = problem.geometry
    lopsided = any(low != high for low, high in g.padding)
    volume = len(g.w_spatial) == 3
    dilated, strided, grouped = max(g.rhs_dilation) > 1, max(g.window_strides) > 1, g.feature_group_count > 1
    narrow, features = problem.dtype.itemsize == 2, problem.features
    window = math.prod(g.w_spatial) > 1  # what has none, XLA computes as a matrix product
    if g.is_product:
        return _conv_xla.PRODUCT
    if window and not grouped and problem.multiplications <= _FEW_MULTIPLICATIONS:
        return ""
    if kind == "backward_filter":
        apart = all(k <= stride for k, stride in zip(g.w_spatial, g.window_strides, strict=True))
        if apart and narrow and not (transposed or dilated or lopsided or volume or grouped):
            return "XLA's choice of kernel is the better one where windows do not overlap"
        missed = strided or dilated or lopsided or (volume and not grouped) or slow_to_transpose(problem)
        return "" if missed else _GROUPS if grouped else _LEVEL
    if kind == "forward":
        if lopsided or (volume and not grouped):
            return ""
        return "XLA's choice of kernel is the better one in this dtype" if dilated and not narrow else _LEVEL
    if grouped:
        several = features != g.feature_group_count
        return "" if dilated or (narrow and several and (lopsided or strided)) else _GROUPS
    if transposed:
        return "" if strided or volume or lopsided else _LEVEL
    if features < _FEW_FEATURES:
        return "" if volume and narrow else "XLA's choice of kernel is the better one for few input features"
    return "" if lopsided or volume else _LEVEL


def slower_for_examples(kind: str, problem: Problem) -> bool:
    """Whether XLA is to be preferred for a unit of independent examples, which on cuDNN are groups of one convolution.

    Their weight gradients are products of matrices on XLA (see `_conv_xla.py`), which on an H200 took 0.1 to 1.3 of
    cuDNN's time for 16 to 256 examples, but for few examples of many positions up to 7 times as long.
    """
    if kind != "backward_filter" or not problem.examples or problem.is_depthwise:
        return False
    positions = problem.batch * math.prod(problem.geometry.y_spatial)
    return math.prod(problem.examples) > _FEW_EXAMPLES or positions < _MANY_POSITIONS


def slow_to_transpose(problem: Problem) -> bool:
    """Whether XLA would take long to transpose dw from cuDNN's layout, and a call from here does it itself."""
    features = problem.features // problem.geometry.feature_group_count
    many = problem.out_features >= _MANY_FEATURES and math.prod(problem.w_shape) >= _MANY_WEIGHTS
    padded = features % _TENSOR_CORE or problem.out_features % _TENSOR_CORE  # by cuDNN, where XLA may take another way
    window = math.prod(problem.geometry.w_spatial) > 1
    return problem.dtype.itemsize == 2 and window and many and not padded and _ffi.transposes_filter(problem)


def how_transposed(problem: Problem) -> str:
    """What is to be told of the transposition of dw."""
    return "XLA would take long to transpose the weights" if slow_to_transpose(problem) else ""


# With 1024 output features 294912 weights take XLA 8 us and a kernel of our own 2, with 512 ones 2359296 take them 12
# to 70 us and 4. With 256 or fewer, up to 589824 take XLA 2 us at most.
_MANY_FEATURES, _MANY_WEIGHTS = 512, 1 << 18
_TENSOR_CORE = 8  # features of 2 bytes that its kernels take at a time
_FEW_FEATURES = 8
_FEW_EXAMPLES, _MANY_POSITIONS = 8, 1 << 12
_FEW_MULTIPLICATIONS = 1 << 28  # 8 x 28 x 28 pixels, 64 features to 64, a window of 3 x 3: some 10 us

# What the usual case meets: a plain convolution, and a transposed one whose value alone is XLA's weakness too.
USUAL: Obstacles = {("cudnn", kind): Obstacle(_LEVEL, slower=True) for kind in _ffi.CONV_KINDS}
USUAL_TRANSPOSED: Obstacles = {("cudnn", "forward"): Obstacle(_LEVEL, slower=True)}


def obstacles(
    problem: Problem,
    precision: Any,
    implementation: str | None,
    transposed: bool,
    epilogue: _ffi.Epilogue,
    taken: Collection[str] = (),
) -> Obstacles:
    """What stands in the way of cuDNN in each unit of a call.

    The units in `taken` have a faster kernel: cuDNN is not asked for them.
    """
    if implementation not in (None, "cudnn") or _ffi.cuda_problem():
        return {}  # it is not asked for, or the dispatch tells by itself
    found: dict[tuple[str, str], Obstacle | None] = {}
    for kind in _ffi.CONV_KINDS:
        obstacle = None
        if kind in taken:
            obstacle = Obstacle("jaxgrad's own kernel is the faster one", slower=True)
        elif implementation is None and (reason := faster_on_xla(kind, problem, transposed)):
            obstacle = Obstacle(reason, slower=True)
        else:
            obstacle = without_plan(kind, problem, precision, config.current(), epilogue)
        found["cudnn", kind] = obstacle
    return found


def without_plan(
    kind: str, problem: Problem, precision: Any, settings: config.Settings, epilogue: _ffi.Epilogue
) -> Obstacle | None:
    """Why cuDNN has no kernel, as far as can be said here: without a GPU that is left to where the program runs.

    Raises RuntimeError where cuDNN cannot be asked and other processes, where it can be, wait for the same program.
    """
    try:
        if kind == "forward" and fuses(problem, precision, settings, epilogue):
            return None
        plan = _ffi.cuda_conv_plan(kind, problem, _ffi.allows_tf32(precision), settings)
    except RuntimeError as error:
        if jax.process_count() > 1:
            raise
        return Obstacle(f"cuDNN could not be asked: {error}", missing=str(error))
    return None if plan is not None else Obstacle(f"cuDNN has no kernel for the unit {kind} of this shape")


def fuses(problem: Problem, precision: Any, settings: config.Settings, epilogue: _ffi.Epilogue) -> bool:
    """Whether one kernel of cuDNN is to compute y, add the bias and take the relu.

    A bias alone is XLA's to add, which costs as little and fuses with what follows. Without a GPU here nobody knows
    whether cuDNN has the kernel, and XLA does the rest. Raises RuntimeError where cuDNN cannot be asked.
    """
    if not epilogue.relu or _ffi.gpu_ordinal() is None:
        return False
    return _ffi.cuda_conv_plan("forward", problem, _ffi.allows_tf32(precision), settings, epilogue) is not None


def where_relu_is(problem: Problem, precision: Any, settings: config.Settings, epilogue: _ffi.Epilogue) -> str:
    """Where the relu of a call that runs on cuDNN is computed."""
    if fuses(problem, precision, settings, epilogue):
        return "with bias and relu in its kernel" if epilogue.has_bias else "with relu in its kernel"
    if _ffi.gpu_ordinal() is None:
        return "relu is XLA's: without a GPU here cuDNN cannot be asked for a kernel with it"
    return "relu is XLA's: cuDNN has no kernel with it for this shape"


def forward(
    geometry: Geometry,
    precision: Any,
    settings: config.Settings,
    relu: bool,
    x: jax.Array,
    w: jax.Array,
    bias: jax.Array | None,
) -> jax.Array:
    """y, or its relu. What the kernel does not do of that XLA does, and fuses it with what follows."""
    epilogue = _ffi.Epilogue(bias is not None, relu)
    if fuses(_conv_problem.of_forward(geometry, x, w), precision, settings, epilogue):
        return _ffi.cuda_conv_forward(geometry, precision, settings, x, w, bias, relu)
    y = _ffi.cuda_conv_forward(geometry, precision, settings, x, w)
    return _conv_xla.finish(y, bias, relu, geometry.out_spec)


def backward_filter(
    geometry: Geometry, precision: Any, settings: config.Settings, want_bias: bool, x: jax.Array, dy: jax.Array
) -> tuple[jax.Array, jax.Array | None]:
    """(dw, db); XLA sums db."""
    dw = _ffi.cuda_conv_backward_filter(geometry, precision, settings, x, dy)
    return dw, _conv_xla.bias_gradient(geometry, dy) if want_bias else None
