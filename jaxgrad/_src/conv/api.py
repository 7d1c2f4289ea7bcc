"""Convolution: the public op, its checks and which of the triangle's units it is.

The path of a call: `conv_general_dilated` has jax.lax check its arguments, `_conv_onednn`, `_conv_cuda` and
`_conv_cudnn` say which units their kernels take, `_conv_triangle` holds the three units and their rules, `_ffi` calls
the handlers: those of ffi/cpu/conv_ffi.cc, which run ffi/cpu/conv.cc on oneDNN, of ffi/cuda/conv_ffi.cc, which run
ffi/cuda/conv.cc on cuDNN, and of ffi/cuda/depthwise_filter_ffi.cc, which run a kernel of our own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxgrad import (
    _checks,
    _conv_cuda,
    _conv_cudnn,
    _conv_onednn,
    _conv_problem,
    _conv_tangents,
    _conv_triangle,
    _conv_xla,
    _ffi,
    _forward_mode,
    config,
)
from jaxgrad._conv_geometry import Geometry, Pairs, dilated_size, transposed
from jaxgrad._conv_problem import Problem
from jaxgrad._dispatch import IMPLEMENTATIONS, XLA, Notes, Obstacle, Obstacles, Op, symbolic_obstacle
from jaxgrad._partitioning import vary_alike

_OP = "conv_general_dilated"
KERNELS = (_conv_onednn.KERNEL, _conv_cuda.KERNEL, _conv_cudnn.KERNEL)
_MOST_DESCRIPTIONS = 4096  # kept, of calls of different shapes and settings
_DISPATCH = Op(_OP, KERNELS, _ffi.CONV_KINDS, {**_conv_cuda.USUAL, **_conv_cudnn.USUAL})


def conv_general_dilated(
    lhs: jax.typing.ArrayLike,
    rhs: jax.typing.ArrayLike,
    window_strides: Sequence[int],
    padding: str | Sequence[tuple[int, int]],
    lhs_dilation: Sequence[int] | None = None,
    rhs_dilation: Sequence[int] | None = None,
    dimension_numbers: Any = None,
    feature_group_count: int = 1,
    batch_group_count: int = 1,
    precision: Any = None,
    preferred_element_type: Any = None,
    *,
    bias: jax.typing.ArrayLike | None = None,
    activation: str | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """`jax.lax.conv_general_dilated`, argument for argument, with fast gradients.

    Args:
      lhs: the input, of rank n + 2 for n spatial axes.
      rhs: the window's weights, of rank n + 2.
      window_strides: n strides.
      padding: "SAME", "SAME_LOWER", "VALID", or n pairs (low, high), which may be negative.
      lhs_dilation: n factors by which the input is spread, or None for ones.
      rhs_dilation: n factors by which the window is spread, or None for ones.
      dimension_numbers: None (NCHW, OIHW, NCHW), three strings such as ("NHWC", "HWIO", "NHWC"), or
        `jax.lax.ConvDimensionNumbers`.
      feature_group_count: the number of groups that the features fall into.
      batch_group_count: the number of groups that the batch falls into.
      precision, preferred_element_type: as in `jax.lax`.
      bias: [output features], added to the result and of its dtype, or None.
      activation: "relu" of that, or None for none. Its gradient at zero is zero, as that of `jax.nn.relu` is.
      implementation: None for the fastest known, "cpu" for oneDNN's kernels, "cudnn" for cuDNN's on an NVIDIA GPU,
        "cuda" for jaxgrad's own there, which is one for the weight gradient of depthwise convolutions, with XLA for the
        rest, "xla" for plain XLA. `jaxgrad.explain` tells what None comes to for a call and its gradients, and why.

    Returns:
      The result, with the shape and dtype of `jax.lax.conv_general_dilated`'s.

    Raises:
      TypeError, ValueError: what `jax.lax.conv_general_dilated` raises; bias of another shape or dtype; an unknown
        activation or implementation; or a forced implementation that has no kernel for the call, with the reason, or
        that is lowered for another platform than its own.
      RuntimeError: a forced implementation whose library or compiled module cannot be loaded.

    oneDNN takes 1 to 3 spatial axes in any layout, groups, window dilation, asymmetric and negative padding, in
    float32, bfloat16 and float16 (computed in float32), and input dilation where the window strides are 1. cuDNN takes
    the same and float64; `jaxgrad.config` says how its kernels are chosen, and float32 is rounded to TF32 unless
    `precision` is the highest, as in XLA. All else runs on XLA. Reverse-mode differentiation works to any order on the
    same kernels, and so does forward mode inside `jaxgrad.forward_mode`.

    With an activation the gradients read y in the place of its argument, which is not kept. Where the call runs on
    cuDNN, and that has a kernel for convolution, bias and activation in one, it is taken; else XLA computes the
    activation.

    Under `jit` over a mesh each device works on its part of the batch and, without groups, of the features, input or
    output. What adds up is summed over the mesh: gradients of weights over the batch, the result over input features.
    What is spread otherwise is gathered first. Examples of `jax.vmap` are spread as a batch is.

    Example:
      >>> x, w = jnp.ones((8, 32, 32, 3)), jnp.ones((3, 3, 3, 16))
      >>> jaxgrad.conv_general_dilated(x, w, (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")).shape
      (8, 16, 16, 16)
    """
    settings = {
        "window_strides": tuple(window_strides),
        "padding": padding,
        "lhs_dilation": None if lhs_dilation is None else tuple(lhs_dilation),
        "rhs_dilation": None if rhs_dilation is None else tuple(rhs_dilation),
        "dimension_numbers": dimension_numbers,
        "feature_group_count": feature_group_count,
        "batch_group_count": batch_group_count,
        "precision": tuple(precision) if isinstance(precision, list) else precision,
        "preferred_element_type": preferred_element_type,
    }
    return convolve(_DISPATCH, lhs, rhs, bias, activation, implementation, settings)


def convolve(
    op: Op,
    lhs: Any,
    rhs: Any,
    bias: Any,
    activation: str | None,
    implementation: str | None,
    settings: dict[str, Any],
    window_reversed: bool = False,
) -> jax.Array:
    """The convolution that `settings`, arguments of `jax.lax.conv_general_dilated`, describe, of rhs as it is given or
    with its window reversed."""
    name = f"jaxgrad.{op.name}"
    _checks.check_choice(name, "activation", activation, (None, "relu"))
    _checks.check_choice(name, "implementation", implementation, IMPLEMENTATIONS)
    lhs, rhs = _checks.as_array(name, "lhs", lhs), _checks.as_array(name, "rhs", rhs)
    plain: Callable[..., jax.Array] = partial(lax.conv_general_dilated, **settings)
    has_bias, relu = bias is not None, activation == "relu"
    result, dn, call, outside, of_onednn = _described(settings, lhs, rhs, has_bias, window_reversed)
    bias = _check_bias(name, bias, result, dn)
    obstacle: Obstacle | None = None
    obstacles: Obstacles = {}
    notes: Notes = {}
    if call is None:
        obstacle = Obstacle(outside)
    else:
        lhs, rhs = (a if a.dtype == result.dtype else a.astype(result.dtype) for a in (lhs, rhs))
        problem, precision = call.problem(lhs, rhs), settings["precision"]
        epilogue = _ffi.Epilogue(has_bias, relu)
        obstacles = {**of_onednn, **_obstacles_of_cuda(call, problem, precision, implementation, epilogue)}
        notes = _notes(call, problem, precision, epilogue, obstacles)
    routes = op.decide(implementation, obstacle, obstacles, notes).routes
    plain_suits = implementation == "xla" or _ffi.cuda_problem()  # on a GPU the triangle has better rules for vmap
    if call is None or (plain_suits and all(route == XLA for route in routes.values()) and call.geometry.suits_xla):
        rhs = lax.rev(rhs, dn.rhs_spec[2:]) if window_reversed else rhs
        return _conv_xla.finish(plain(lhs, rhs), bias, relu, dn.out_spec)
    spec = _conv_triangle.Spec(call.geometry, settings["precision"], tuple(routes.items()), config.current())
    lhs, rhs, bias = vary_alike(lhs, rhs, bias)
    return call.run(lhs, rhs, bias, relu, spec)


def _obstacles_of_cuda(
    call: _ForwardCall | _TransposedCall,
    problem: Problem,
    precision: Any,
    implementation: str | None,
    epilogue: _ffi.Epilogue,
) -> Obstacles:
    """What stands in the way of each of CUDA's kernels in each unit of a call."""
    if call.transposed:
        epilogue = _ffi.Epilogue()  # which is XLA's
    own = _conv_cuda.obstacles(problem, implementation)
    taken = [unit for (_, unit), found in own.items() if found is None]
    return {
        **own,
        **_conv_cudnn.obstacles(problem, precision, implementation, call.transposed, epilogue, taken),
    }


def _notes(
    call: _ForwardCall | _TransposedCall,
    problem: Problem,
    precision: Any,
    epilogue: _ffi.Epilogue,
    obstacles: Obstacles,
) -> Notes:
    """Where relu is computed, and how cuDNN's weight gradient is transposed."""
    on_cudnn = {unit for (name, unit), found in obstacles.items() if name == "cudnn" and found is None}
    notes = {}
    if epilogue.relu:
        unit = "backward_input" if call.transposed else "forward"
        notes = {("cpu", unit): "relu is XLA's", ("cudnn", unit): "relu is XLA's"}
        if not call.transposed and unit in on_cudnn:
            notes["cudnn", unit] = _conv_cudnn.where_relu_is(problem, precision, config.current(), epilogue)
    if "backward_filter" in on_cudnn:
        notes["cudnn", "backward_filter"] = _conv_cudnn.how_transposed(problem)
    return notes


class _Description(NamedTuple):
    """What a call is by its shapes, dtypes and settings alone."""

    result: jax.ShapeDtypeStruct
    dimension_numbers: lax.ConvDimensionNumbers
    call: _ForwardCall | _TransposedCall | None
    outside: str  # why it is none of the triangle's units, where it is none
    of_onednn: Obstacles


def _described(
    settings: dict[str, Any], lhs: jax.Array, rhs: jax.Array, has_bias: bool, window_reversed: bool
) -> _Description:
    """The description, kept for the next call like this one: without `jit` around it, a call would take Python longer
    to describe than JAX to run. What cuDNN says is none of it, for that may change: with memory, or the settings."""
    frozen = tuple((name, _hashable(value)) for name, value in settings.items())
    arrays = lhs.shape, lhs.dtype, rhs.shape, rhs.dtype
    x64 = jax.config.jax_enable_x64  # type: ignore[attr-defined]  # which bounds the preferred dtype
    try:
        hash(frozen)
    except TypeError:  # such as a padding that is an array of NumPy
        return _describe.__wrapped__(frozen, *arrays, has_bias, window_reversed, x64)
    return _describe(frozen, *arrays, has_bias, window_reversed, x64)


@lru_cache(_MOST_DESCRIPTIONS)
def _describe(frozen, lhs_shape, lhs_dtype, rhs_shape, rhs_dtype, has_bias, window_reversed, x64):
    settings = dict(frozen)
    lhs: Any = jax.ShapeDtypeStruct(lhs_shape, lhs_dtype)
    rhs: Any = jax.ShapeDtypeStruct(rhs_shape, rhs_dtype)
    result = jax.eval_shape(partial(lax.conv_general_dilated, **settings), lhs, rhs)  # jax.lax's own checks of the call
    dn = lax.conv_dimension_numbers(lhs_shape, rhs_shape, settings["dimension_numbers"])
    if outside := _outside_triangle(lhs, rhs, result, settings):
        return _Description(result, dn, None, outside, {})
    call = _triangle_call(lhs_shape, rhs_shape, dn, settings, window_reversed)
    if min(call.geometry.x_spatial) <= 0:
        return _Description(result, dn, None, "a window that meets nothing but padding is XLA's", {})
    problem = call.problem(lhs, rhs).in_dtype(result.dtype)
    return _Description(result, dn, call, "", _conv_onednn.obstacles(problem, has_bias and not call.transposed))


def _hashable(value: Any) -> Any:
    """Lists as tuples."""
    return tuple(map(_hashable, value)) if type(value) in (list, tuple) else value


def _check_bias(name: str, bias: Any, result: jax.ShapeDtypeStruct, dn: lax.ConvDimensionNumbers) -> jax.Array | None:
    if bias is None:
        return None
    bias = _checks.as_array(name, "bias", bias)
    _checks.check_shape(name, "bias", bias, ("output features",), (result.shape[dn.out_spec[1]],))
    if bias.dtype != result.dtype:
        raise TypeError(f"{name}: bias must have the dtype of the result, {result.dtype.name}, got {bias.dtype.name}")
    return bias


def _outside_triangle(lhs: jax.Array, rhs: jax.Array, result: jax.ShapeDtypeStruct, settings: dict[str, Any]) -> str:
    """Why a call is none of the triangle's units; empty when it is one."""
    n = lhs.ndim - 2
    spread = any(d > 1 for d in settings["lhs_dilation"] or ())
    if not jnp.issubdtype(lhs.dtype, jnp.floating):
        return f"the dtype {lhs.dtype.name} is XLA's"
    exact = result.dtype == lhs.dtype or result.dtype.itemsize > lhs.dtype.itemsize  # every operand is one of result's
    if lhs.dtype != rhs.dtype or not exact or result.dtype.name not in _checks.FLOATING:
        return f"operands of {lhs.dtype.name} and {rhs.dtype.name} with a result of {result.dtype.name} are XLA's"
    if not 1 <= n <= 3:
        return f"{n} spatial axes are XLA's; the kernels take 1 to 3"
    if settings["batch_group_count"] > 1:
        return "batch_group_count above 1 is XLA's"
    if spread and any(s > 1 for s in settings["window_strides"]):
        return "lhs_dilation and window_strides both above 1 are XLA's"
    if symbolic := symbolic_obstacle(lhs, rhs):
        return symbolic.reason
    if min(*settings["window_strides"], *(settings["lhs_dilation"] or (1,)), *(settings["rhs_dilation"] or (1,))) < 1:
        return "a stride or dilation below 1 is for XLA to refuse"
    if 0 in (*lhs.shape, *rhs.shape, *result.shape):
        return "an array without elements is XLA's"
    return ""


def _triangle_call(
    lhs_shape: tuple[int, ...],
    rhs_shape: tuple[int, ...],
    dn: lax.ConvDimensionNumbers,
    settings: dict[str, Any],
    window_reversed: bool = False,
) -> _ForwardCall | _TransposedCall:
    n, groups = len(lhs_shape) - 2, settings["feature_group_count"]
    strides = tuple(map(int, settings["window_strides"]))
    lhs_dilation = tuple(map(int, settings["lhs_dilation"] or (1,) * n))
    rhs_dilation = tuple(map(int, settings["rhs_dilation"] or (1,) * n))
    sizes = [lhs_shape[axis] for axis in dn.lhs_spec[2:]]
    window = [rhs_shape[axis] for axis in dn.rhs_spec[2:]]
    padding = settings["padding"]
    if isinstance(padding, str):
        extents = [dilated_size(k, d) for k, d in zip(window, rhs_dilation, strict=True)]
        padding = lax.padtype_to_pads(sizes, extents, strides, padding)
    pads: Pairs = tuple((int(low), int(high)) for low, high in padding)
    spread = any(d > 1 for d in lhs_dilation)
    if spread or (max(sizes) == 1 and max(strides) == 1):
        call = _TransposedCall(
            *transposed(lhs_shape, rhs_shape, dn, lhs_dilation, pads, rhs_dilation, groups, window_reversed)
        )
        # A window around a single position, whose padding is all that it meets otherwise, spreads it.
        if spread or call.geometry.is_product:
            return call
    crop = tuple((min(0, low), min(0, high)) for low, high in pads)
    kept = tuple((max(0, low), max(0, high)) for low, high in pads)
    cropped = tuple(size + sum(pair) for size, pair in zip(sizes, crop, strict=True))
    lhs_spec, rhs_spec, out_spec = map(tuple, dn)
    geometry = Geometry(
        lhs_spec, rhs_spec, out_spec, strides, kept, rhs_dilation, groups, cropped, tuple(window), window_reversed
    )
    return _ForwardCall(geometry, crop)


@dataclasses.dataclass(frozen=True)
class _ForwardCall:
    """The triangle's forward unit, after x is cropped where the padding is negative."""

    geometry: Geometry
    crop: Pairs

    transposed: ClassVar[bool] = False

    def problem(self, lhs: jax.Array, rhs: jax.Array) -> Problem:
        return _conv_problem.of_forward(self.geometry, lhs, rhs)

    def run(
        self, lhs: jax.Array, rhs: jax.Array, bias: jax.Array | None, relu: bool, spec: _conv_triangle.Spec
    ) -> jax.Array:
        lhs = _pad(lhs, self.geometry.lhs_spec, self.crop)
        if relu:
            return _forward_mode.call(_conv_triangle.forward_relu, _conv_tangents.FORWARD_RELU, spec, lhs, rhs, bias)
        return _forward_mode.call(_conv_triangle.forward, _conv_tangents.FORWARD, spec, lhs, rhs, bias)


@dataclasses.dataclass(frozen=True)
class _TransposedCall:
    """The triangle's backward_input unit, its result padded where the window reaches beyond all of x."""

    geometry: Geometry
    pad: Pairs

    transposed: ClassVar[bool] = True

    def problem(self, lhs: jax.Array, rhs: jax.Array) -> Problem:
        g = self.geometry
        return Problem(g, lhs.shape[g.out_spec[0]], rhs.shape[_output_axis(g)], lhs.shape[g.out_spec[1]], lhs.dtype)

    def run(
        self, lhs: jax.Array, rhs: jax.Array, bias: jax.Array | None, relu: bool, spec: _conv_triangle.Spec
    ) -> jax.Array:
        g = self.geometry
        w = rhs if g.feature_group_count == 1 else swap_features(rhs, g.rhs_spec, g.feature_group_count)
        y = _forward_mode.call(_conv_triangle.backward_input, _conv_tangents.BACKWARD_INPUT, spec, lhs, w)
        return _conv_xla.finish(_pad(y, g.lhs_spec, self.pad), bias, relu, g.lhs_spec)


def _output_axis(g: Geometry) -> int:
    """The axis of the call's own rhs that holds its output features, which are the geometry's input features."""
    return g.rhs_spec[0] if g.feature_group_count > 1 else g.rhs_spec[1]


def swap_features(w: jax.Array, rhs_spec: Sequence[int], groups: int) -> jax.Array:
    """Swaps input and output features within each group: [G O, I, ...] becomes [G I, O, ...], in w's own layout."""
    canonical = jnp.transpose(w, rhs_spec)
    out, inn, *window = canonical.shape
    grouped = canonical.reshape(groups, out // groups, inn, *window)
    swapped = jnp.swapaxes(grouped, 1, 2).reshape(groups * inn, out // groups, *window)
    return jnp.transpose(swapped, [tuple(rhs_spec).index(axis) for axis in range(w.ndim)])


def _pad(array: jax.Array, spec: Sequence[int], pairs: Pairs) -> jax.Array:
    """Pads the spatial axes with zeros, or crops them."""
    if not any(map(any, pairs)):
        return array
    config = [(0, 0, 0)] * array.ndim
    for axis, (low, high) in zip(spec[2:], pairs, strict=True):
        config[axis] = (low, high, 0)
    return lax.pad(array, jnp.zeros((), array.dtype), config)
