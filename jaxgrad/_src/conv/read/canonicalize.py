"""Reads a call of `jax.lax.conv_general_dilated` as one of the convolution passes.

A convolution without input dilation is a forward pass. One with input dilation and unit window strides is the input
gradient of another convolution. All others run on XLA.
"""

from __future__ import annotations

import dataclasses
import itertools
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.lax import conv_general_dilated  # held by name: a program may assign jaxgrad's op to jax.lax
from jax.sharding import NamedSharding

from jaxgrad._src.choice.op import Rejection
from jaxgrad._src.choice.selection import reject_symbolic_shapes, taken
from jaxgrad._src.choice.settings import of_kernels
from jaxgrad._src.conv.backend import PASSES
from jaxgrad._src.conv.backends import BACKENDS
from jaxgrad._src.conv.call.geometry import dilated_size, pad_spatial
from jaxgrad._src.conv.call.params import ConvCall
from jaxgrad._src.conv.on_xla.faults import is_miscompiled, is_or_derives_miscompiled
from jaxgrad._src.conv.read.pass_calls import (
    ConvArguments,
    ForwardCall,
    InputGradientCall,
    forward_call,
    input_gradient_call,
)
from jaxgrad._src.core import checks
from jaxgrad._src.core.jax_internals import cleared_lru_cache

_MAX_READINGS = 4096  # kept, of calls with different shapes and arguments


@dataclasses.dataclass(frozen=True)
class LaxArguments:
    """The arguments of `jax.lax.conv_general_dilated`, and whether the window is reversed.

    Without the arrays and `out_sharding`, on which no reading depends.
    """

    window_strides: Any
    padding: Any
    lhs_dilation: Any = None
    rhs_dilation: Any = None
    dimension_numbers: Any = None
    feature_group_count: int = 1
    batch_group_count: int = 1
    precision: Any = None
    preferred_element_type: Any = None
    window_reversed: bool = False
    types: Any = dataclasses.field(init=False, default=None)  # 1, 1.0 and True are equal, but not all are allowed

    def __post_init__(self) -> None:
        values = {name: _as_tuples(getattr(self, name)) for name in self._names()}
        for name, value in values.items():
            object.__setattr__(self, name, value)
        object.__setattr__(self, "types", tuple(map(_types, values.values())))

    @classmethod
    def _names(cls) -> list[str]:
        return [field.name for field in dataclasses.fields(cls) if field.init]

    def call_lax(self, lhs: jax.Array, rhs: jax.Array, out_sharding: Any = None) -> jax.Array:
        """`jax.lax.conv_general_dilated`, of rhs as it is."""
        arguments = {name: getattr(self, name) for name in self._names() if name != "window_reversed"}
        return conv_general_dilated(lhs, rhs, **arguments, out_sharding=out_sharding)

    def call_lax_on_padded(self, lhs: jax.Array, rhs: jax.Array, out_sharding: Any = None) -> jax.Array:
        """The same call, with lhs dilated and padded in a separate operation. XLA does not move the padding back."""
        spec = lax.conv_dimension_numbers(lhs.shape, rhs.shape, self.dimension_numbers).lhs_spec
        lhs = lax.optimization_barrier(pad_spatial(lhs, spec, self.padding, self.lhs_dilation or ()))
        no_padding = ((0, 0),) * len(self.padding)
        arguments = dataclasses.replace(self, padding=no_padding, lhs_dilation=None)
        return arguments.call_lax(lhs, rhs, out_sharding)

    def explicit_sharding(self, lhs: jax.Array, rhs: jax.Array, out_sharding: Any) -> NamedSharding | None:
        """The sharding of the result over explicit mesh axes; None if no argument asks for one, or no axis is explicit.

        Raises what `jax.lax.conv_general_dilated` raises for `out_sharding`.
        """
        if out_sharding is None:
            return None
        sharding = jax.eval_shape(partial(self.call_lax, out_sharding=out_sharding), lhs, rhs).sharding
        return sharding if sharding is not None and sharding.mesh.explicit_axes else None


def _as_tuples(value: Any) -> Any:
    """The value with lists and arrays as tuples, so that it is hashable, and with ints of NumPy as ints of Python."""
    if (
        isinstance(value, (np.ndarray, jax.Array))
        and not isinstance(value, jax.core.Tracer)
        and not checks.is_key(value)
    ):
        value = value.tolist()
    if type(value) in (list, tuple):
        return tuple(map(_as_tuples, value))
    return int(value) if isinstance(value, np.integer) else value


def _types(value: Any) -> Any:
    return tuple(map(_types, value)) if type(value) is tuple else type(value)


class Reading(NamedTuple):
    """A call, read by its shapes, dtypes and arguments alone.

    Attributes:
      result: shape and dtype of the result.
      dimension_numbers: of the call.
      pass_call: the pass that computes the call, or None.
      reason: why no pass does, if so.
      static_rejections: rejections by backends that depend on the problem alone, by implementation and pass.
      lax_is_miscompiled: whether XLA may compute the call of `jax.lax`, or its derivatives, incorrectly.
    """

    result: jax.ShapeDtypeStruct
    dimension_numbers: lax.ConvDimensionNumbers
    pass_call: ForwardCall | InputGradientCall | None
    reason: str
    static_rejections: dict[tuple[str, str], Rejection | None]
    lax_is_miscompiled: bool


def read(arguments: LaxArguments, lhs: jax.Array, rhs: jax.Array, has_bias: bool) -> Reading:
    """Reads a call; raises what `jax.lax.conv_general_dilated` raises.

    Readings are kept: outside `jax.jit`, reading a small call takes longer than running it.
    """
    shapes = lhs.shape, lhs.dtype, rhs.shape, rhs.dtype
    x64 = jax.config.jax_enable_x64  # type: ignore[attr-defined]  # limits preferred_element_type
    try:
        hash(arguments)
    except TypeError:  # for instance a padding that is a NumPy array
        return _read.__wrapped__(arguments, *shapes, has_bias, x64)  # type: ignore[attr-defined]
    return _read(arguments, *shapes, has_bias, x64)


@cleared_lru_cache(_MAX_READINGS)
def _read(arguments, lhs_shape, lhs_dtype, rhs_shape, rhs_dtype, has_bias, x64):
    lhs: Any = jax.ShapeDtypeStruct(lhs_shape, lhs_dtype)
    rhs: Any = jax.ShapeDtypeStruct(rhs_shape, rhs_dtype)
    result = jax.eval_shape(arguments.call_lax, lhs, rhs)  # checks the call as jax.lax does
    dn = lax.conv_dimension_numbers(lhs_shape, rhs_shape, arguments.dimension_numbers)
    window = [rhs_shape[axis] for axis in dn.rhs_spec[2:]]
    rates = arguments.rhs_dilation or (1,) * len(window)
    extents = [(size - 1) * rate + 1 for size, rate in zip(window, rates, strict=True)]
    if any(isinstance(size, int) and size >= 1 << 63 for size in extents):
        raise OverflowError(f"the dilated window has the sizes {extents}")
    if any(isinstance(size, int) and size >= 1 << 62 for size in result.shape):
        raise OverflowError(f"the result has the shape {result.shape}")
    reason = _runs_on_xla(arguments, lhs, rhs, result)
    miscompiled = is_miscompiled_by_xla(arguments, lhs_shape, rhs_shape, result.shape)
    if reason:
        return Reading(result, dn, None, reason, {}, miscompiled)
    pass_call = _pass_call(arguments, lhs_shape, rhs_shape, result.shape)
    if min(pass_call.geometry.x_spatial) <= 0:
        return Reading(result, dn, None, "cropping leaves no input; runs on XLA", {}, miscompiled)
    problem = pass_call.problem(lhs, rhs).in_dtype(result.dtype)
    call = ConvCall(problem, arguments.precision, of_kernels(), has_bias, transposed=pass_call.pass_name != "forward")
    rejections: dict[tuple[str, str], Rejection | None] = {}
    for backend, name in itertools.product(BACKENDS, PASSES):
        if backend.depends_on_problem_only:
            rejected = taken(BACKENDS, backend, name, rejections) or backend.reject(name, call, forced=False)
            rejections[backend.implementation, name] = rejected
    return Reading(result, dn, pass_call, "", rejections, miscompiled)


def is_miscompiled_by_xla(
    arguments: LaxArguments,
    lhs_shape: tuple[int, ...],
    rhs_shape: tuple[int, ...],
    out_shape: tuple[int, ...],
    only_on: str | None = None,
) -> bool:
    """Whether XLA may miscompile the call or a derivative of it; with `only_on`, the call itself on this platform.

    It compiles the padding of a name correctly.
    """
    empty = any(isinstance(size, int) and size == 0 for size in (*lhs_shape, *rhs_shape, *out_shape))
    named = isinstance(arguments.padding, str)
    if empty or named or not all(isinstance(size, (int, np.integer)) for pair in arguments.padding for size in pair):
        return False
    a = normalize(arguments, lhs_shape, rhs_shape, out_shape)
    sizes, factors = (a.lhs_spatial, a.window, a.out_spatial), (a.lhs_dilation, a.rhs_dilation, a.window_strides)
    if only_on is not None:
        return is_miscompiled(sizes, factors, a.padding, only_on)
    return is_or_derives_miscompiled(sizes, factors, a.padding)


def _runs_on_xla(arguments: LaxArguments, lhs: jax.Array, rhs: jax.Array, result: jax.ShapeDtypeStruct) -> str:
    """Returns why no pass computes the call; empty if one does."""
    strides = arguments.window_strides
    lhs_dilation, rhs_dilation = arguments.lhs_dilation or (1,), arguments.rhs_dilation or (1,)
    if reason := unsupported_operands(lhs, rhs, result):
        return reason
    if arguments.batch_group_count > 1:
        return "batch_group_count above 1 runs on XLA"
    if max(lhs_dilation) > 1 and max(strides) > 1:
        return "lhs_dilation and window_strides both above 1 run on XLA"
    if min(*strides, *lhs_dilation, *rhs_dilation) < 1:
        return "a stride or dilation below 1 runs on XLA, which refuses it"
    return ""


def unsupported_operands(lhs: jax.Array, rhs: jax.Array, result: jax.ShapeDtypeStruct) -> str:
    """Returns why no pass takes operands of these shapes and dtypes; empty if one may."""
    n = lhs.ndim - 2
    if not jnp.issubdtype(lhs.dtype, jnp.floating):
        return f"the dtype {lhs.dtype.name} runs on XLA"
    exact = result.dtype == lhs.dtype or result.dtype.itemsize > lhs.dtype.itemsize  # the operands fit its dtype
    if lhs.dtype != rhs.dtype or not exact or result.dtype.name not in checks.FLOATING:
        return f"operands of {lhs.dtype.name} and {rhs.dtype.name} with a result of {result.dtype.name} run on XLA"
    if not 1 <= n <= 3:
        return f"{n} spatial dimensions run on XLA; the kernels take 1 to 3"
    if symbolic := reject_symbolic_shapes(lhs, rhs):
        return symbolic.reason
    if 0 in (*lhs.shape, *rhs.shape, *result.shape):
        return "an array without elements runs on XLA"
    return ""


def _pass_call(
    arguments: LaxArguments, lhs_shape: tuple[int, ...], rhs_shape: tuple[int, ...], out_shape: tuple[int, ...]
) -> ForwardCall | InputGradientCall:
    a = normalize(arguments, lhs_shape, rhs_shape, out_shape)
    if a.is_input_dilated or (max(a.lhs_spatial) == 1 and not a.is_strided):
        call = input_gradient_call(a)
        # A single position that the padding surrounds: its input gradient is a matrix product.
        if a.is_input_dilated or call.geometry.is_matrix_product:
            return call
    return forward_call(a)


def normalize(
    arguments: LaxArguments, lhs_shape: tuple[int, ...], rhs_shape: tuple[int, ...], out_shape: tuple[int, ...]
) -> ConvArguments:
    """The arguments as ints, with the padding that a string stands for."""
    n = len(lhs_shape) - 2
    dn = lax.conv_dimension_numbers(lhs_shape, rhs_shape, arguments.dimension_numbers)
    strides = tuple(map(int, arguments.window_strides))
    rhs_dilation = tuple(map(int, arguments.rhs_dilation or (1,) * n))
    padding = arguments.padding
    if isinstance(padding, str):
        sizes = [lhs_shape[axis] for axis in dn.lhs_spec[2:]]
        extents = [dilated_size(rhs_shape[axis], d) for axis, d in zip(dn.rhs_spec[2:], rhs_dilation, strict=True)]
        padding = lax.padtype_to_pads(sizes, extents, strides, padding)
    return ConvArguments(
        lhs_shape,
        rhs_shape,
        out_shape,
        dn,
        strides,
        tuple((int(low), int(high)) for low, high in padding),
        tuple(map(int, arguments.lhs_dilation or (1,) * n)),
        rhs_dilation,
        arguments.feature_group_count,
        arguments.batch_group_count,
        arguments.window_reversed,
    )
