"""A convolution as `jax.lax` takes it: its arguments, and the shapes and dtypes of its arrays.

A call of an op (`conv/read/op_call.py`) and an equation of a program (`conv/equation.py`) are convolutions of
`jax.lax`, which the convolution passes compute.
"""

from __future__ import annotations

import dataclasses
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.lax import conv_general_dilated  # held by name: a program may assign jaxgrad's op to jax.lax
from jax.sharding import NamedSharding

from jaxgrad._src.choice.selection import reject_symbolic_shapes
from jaxgrad._src.conv.call.geometry import dilated_size, pad_spatial
from jaxgrad._src.conv.on_xla import faults
from jaxgrad._src.conv.read.pass_calls import ConvArguments
from jaxgrad._src.core import checks

CROPPED = "cropping leaves no input; runs on XLA"


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


@dataclasses.dataclass(frozen=True)
class LaxConvolution:
    """A convolution of `jax.lax`: its arguments, and the shapes and dtypes of its arrays."""

    arguments: LaxArguments
    lhs: Any
    rhs: Any
    result: Any

    @cached_property
    def dimension_numbers(self) -> lax.ConvDimensionNumbers:
        return lax.conv_dimension_numbers(self.lhs.shape, self.rhs.shape, self.arguments.dimension_numbers)

    @cached_property
    def normalized(self) -> ConvArguments:
        """The shapes, and the arguments as ints, with the padding that a string stands for."""
        given, dn, ones = self.arguments, self.dimension_numbers, (1,) * (self.lhs.ndim - 2)
        strides = tuple(map(int, given.window_strides))
        rhs_dilation = tuple(map(int, given.rhs_dilation or ones))
        padding = given.padding
        if isinstance(padding, str):
            sizes = [self.lhs.shape[axis] for axis in dn.lhs_spec[2:]]
            window = [self.rhs.shape[axis] for axis in dn.rhs_spec[2:]]
            padding = lax.padtype_to_pads(sizes, list(map(dilated_size, window, rhs_dilation)), strides, padding)
        return ConvArguments(
            self.lhs.shape,
            self.rhs.shape,
            self.result.shape,
            dn,
            strides,
            tuple((int(low), int(high)) for low, high in padding),
            tuple(map(int, given.lhs_dilation or ones)),
            rhs_dilation,
            given.feature_group_count,
            given.batch_group_count,
            given.window_reversed,
        )

    @cached_property
    def unsupported(self) -> str:
        """Why no pass takes arrays of these shapes and dtypes; empty if a pass may."""
        lhs, rhs, result = self.lhs.dtype, self.rhs.dtype, self.result.dtype
        n = self.lhs.ndim - 2
        if not jnp.issubdtype(lhs, jnp.floating):
            return f"the dtype {lhs.name} runs on XLA"
        exact = result == lhs or result.itemsize > lhs.itemsize  # the dtype of the result represents the operands
        if lhs != rhs or not exact or result.name not in checks.FLOATING:
            return f"operands of {lhs.name} and {rhs.name} with a result of {result.name} run on XLA"
        if not 1 <= n <= 3:
            return f"{n} spatial dimensions run on XLA; the kernels take 1 to 3"
        if symbolic := reject_symbolic_shapes(self.lhs, self.rhs):
            return symbolic.reason
        return "an array without elements runs on XLA" if self._is_empty else ""

    @property
    def _is_empty(self) -> bool:
        sizes = *self.lhs.shape, *self.rhs.shape, *self.result.shape
        return any(isinstance(size, int) and size == 0 for size in sizes)

    def is_miscompiled(self, platform: str) -> bool:
        """Whether XLA may miscompile the convolution on a platform."""
        return self._axes is not None and faults.is_miscompiled(*self._axes, platform)

    @cached_property
    def is_or_derives_miscompiled(self) -> bool:
        """Whether XLA may miscompile the convolution, or a derivative of it, on any platform."""
        return self._axes is not None and faults.is_or_derives_miscompiled(*self._axes)

    @cached_property
    def _axes(self) -> tuple[Any, Any, Any] | None:
        """Sizes, factors and padding of the spatial axes, for `on_xla/faults.py`; None if XLA has no fault for them.

        XLA compiles the padding of a name correctly.
        """
        padding = self.arguments.padding
        if self._is_empty or isinstance(padding, str):
            return None
        if not all(isinstance(size, (int, np.integer)) for pair in padding for size in pair):
            return None
        a = self.normalized
        sizes, factors = (a.lhs_spatial, a.window, a.out_spatial), (a.lhs_dilation, a.rhs_dilation, a.window_strides)
        return sizes, factors, a.padding
