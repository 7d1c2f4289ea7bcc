"""A convolution problem: geometry, sizes and dtype. Kernels are selected and planned by it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, TypeVar

import jax

from jaxgrad._src.conv.call.geometry import ConvGeometry, described, unusual

_T = TypeVar("_T")


@dataclasses.dataclass(frozen=True)
class ConvProblem:
    """A convolution of known sizes. All three passes (y, dx, dw) share it.

    Attributes:
      geometry: its geometry.
      batch, features, out_features: the sizes of the batch, input feature and output feature axes.
      dtype: the dtype of every operand.
      num_problems: `(n,)` for n independent convolutions of this shape in one call, along an axis before the axes of
        the geometry; `()` if the arrays have no such axis.
    """

    geometry: ConvGeometry
    batch: int
    features: int
    out_features: int
    dtype: Any
    num_problems: tuple[int, ...] = ()

    @cached_property
    def x_shape(self) -> tuple[int, ...]:
        return laid_out(self.geometry.lhs_spec, self.batch, self.features, self.geometry.x_spatial)

    @cached_property
    def w_shape(self) -> tuple[int, ...]:
        g = self.geometry
        return laid_out(g.rhs_spec, self.out_features, self.features // g.feature_group_count, g.w_spatial)

    @cached_property
    def y_shape(self) -> tuple[int, ...]:
        return laid_out(self.geometry.out_spec, self.batch, self.out_features, self.geometry.y_spatial)

    @cached_property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shapes of x, w and y, without the axis of independent problems."""
        return self.x_shape, self.w_shape, self.y_shape

    @cached_property
    def is_depthwise(self) -> bool:
        """Whether each group has one input and one output feature."""
        return self.features == self.out_features == self.geometry.feature_group_count

    @cached_property
    def multiplications(self) -> int:
        """The multiplications of one pass of one problem, including multiplications with padding."""
        g = self.geometry
        places = self.batch * math.prod(g.y_spatial)
        return places * math.prod(g.w_spatial) * self.features * self.out_features // g.feature_group_count

    def text(self) -> str:
        """Shapes, layouts and parameters."""
        g = self.geometry
        specs = (g.lhs_spec, "NC"), (g.rhs_spec, "OI"), (g.out_spec, "NC")
        arrays = (described(self.dtype, shape, *spec) for shape, spec in zip(self.shapes, specs, strict=True))
        words = [f"{name}={array}" for name, array in zip("xwy", arrays, strict=True)]
        parameters = unusual(
            window_strides=g.window_strides,
            padding=g.padding,
            rhs_dilation=g.rhs_dilation,
            feature_group_count=g.feature_group_count,
            window_reversed=g.window_reversed,
        )
        return " ".join([*words, *parameters, *(f"problems={n}" for n in self.num_problems)])

    def with_geometry(self, geometry: ConvGeometry) -> ConvProblem:
        """The same convolution with other layouts of its operands."""
        return dataclasses.replace(self, geometry=geometry)

    def in_dtype(self, dtype: Any) -> ConvProblem:
        return dataclasses.replace(self, dtype=dtype)

    def in_groups(self) -> ConvProblem:
        """One convolution whose groups are the groups of all independent problems."""
        count = math.prod(self.num_problems)
        return ConvProblem(
            self.geometry.in_groups(count), self.batch, self.features * count, self.out_features * count, self.dtype
        )


def laid_out(spec: Sequence[int], first: _T, second: _T, spatial: Sequence[_T]) -> tuple[_T, ...]:
    """The entries of the axes of an operand, such as their sizes, in the order of its layout `spec`."""
    by_axis = dict(zip(spec, (first, second, *spatial), strict=True))
    return tuple(by_axis[axis] for axis in range(len(spec)))


def forward_problem(geometry: ConvGeometry, x: jax.Array, w: jax.Array) -> ConvProblem:
    batch, features = _leading_sizes(x, geometry.lhs_spec)
    out_features, _ = _leading_sizes(w, geometry.rhs_spec)
    return ConvProblem(geometry, batch, features, out_features, x.dtype, _num_problems(geometry, x))


def input_gradient_problem(geometry: ConvGeometry, dy: jax.Array, w: jax.Array) -> ConvProblem:
    batch, out_features = _leading_sizes(dy, geometry.out_spec)
    _, group_features = _leading_sizes(w, geometry.rhs_spec)
    features = group_features * geometry.feature_group_count
    return ConvProblem(geometry, batch, features, out_features, dy.dtype, _num_problems(geometry, dy))


def weight_gradient_problem(geometry: ConvGeometry, x: jax.Array, dy: jax.Array) -> ConvProblem:
    batch, features = _leading_sizes(x, geometry.lhs_spec)
    _, out_features = _leading_sizes(dy, geometry.out_spec)
    return ConvProblem(geometry, batch, features, out_features, x.dtype, _num_problems(geometry, x))


# By pass, the problem of a call on its two operands.
PROBLEMS: dict[str, Callable[..., ConvProblem]] = {
    "forward": forward_problem,
    "input_gradient": input_gradient_problem,
    "weight_gradient": weight_gradient_problem,
}


def _num_problems(geometry: ConvGeometry, array: jax.Array) -> tuple[int, ...]:
    return array.shape[: array.ndim - len(geometry.lhs_spec)]


def _leading_sizes(array: Any, spec: Sequence[int]) -> tuple[int, int]:
    """The sizes of the first two axes of `spec`, in an array that may have an axis of independent problems first."""
    shape = array.shape[array.ndim - len(spec) :]
    return shape[spec[0]], shape[spec[1]]
