"""What the kernels of a unit of the convolution triangle are chosen by: its geometry, sizes and dtype."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax

from jaxgrad._conv_geometry import Geometry, leading_sizes, shape_of


@dataclasses.dataclass(frozen=True)
class Problem:
    """A convolution of known sizes, whichever of its three operands is being computed.

    Attributes:
      geometry: what of it is static in a call.
      batch, features, out_features: the leading sizes of x and of y.
      dtype: of every operand.
      examples: of as many independent convolutions of this shape in one call, along an axis before the geometry's;
        empty where the arrays have no such axis.
    """

    geometry: Geometry
    batch: int
    features: int
    out_features: int
    dtype: Any
    examples: tuple[int, ...] = ()

    @property
    def x_shape(self) -> tuple[int, ...]:
        return shape_of(self.geometry.lhs_spec, self.batch, self.features, self.geometry.x_spatial)

    @property
    def w_shape(self) -> tuple[int, ...]:
        g = self.geometry
        return shape_of(g.rhs_spec, self.out_features, self.features // g.feature_group_count, g.w_spatial)

    @property
    def y_shape(self) -> tuple[int, ...]:
        return shape_of(self.geometry.out_spec, self.batch, self.out_features, self.geometry.y_spatial)

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Of x, w and y, without the axis of examples."""
        return self.x_shape, self.w_shape, self.y_shape

    @property
    def is_depthwise(self) -> bool:
        """Each group has one feature and one output feature."""
        return self.features == self.out_features == self.geometry.feature_group_count

    @property
    def multiplications(self) -> int:
        """Of each of the three convolutions of one example, those with padding included."""
        g = self.geometry
        places = self.batch * math.prod(g.y_spatial)
        return places * math.prod(g.w_spatial) * self.features * self.out_features // g.feature_group_count

    def laid_out(self, geometry: Geometry) -> Problem:
        """The same convolution with its operands laid out as those of another geometry."""
        return dataclasses.replace(self, geometry=geometry)

    def in_dtype(self, dtype: Any) -> Problem:
        return dataclasses.replace(self, dtype=dtype)

    def in_groups(self) -> Problem:
        """One convolution whose groups are the examples'."""
        count = math.prod(self.examples)
        return Problem(
            self.geometry.in_groups(count), self.batch, self.features * count, self.out_features * count, self.dtype
        )


def of_forward(geometry: Geometry, x: jax.Array, w: jax.Array) -> Problem:
    batch, features = leading_sizes(x, geometry.lhs_spec)
    out_features, _ = leading_sizes(w, geometry.rhs_spec)
    return Problem(geometry, batch, features, out_features, x.dtype, _examples(geometry, x))


def of_backward_input(geometry: Geometry, dy: jax.Array, w: jax.Array) -> Problem:
    batch, out_features = leading_sizes(dy, geometry.out_spec)
    _, of_group = leading_sizes(w, geometry.rhs_spec)
    features = of_group * geometry.feature_group_count
    return Problem(geometry, batch, features, out_features, dy.dtype, _examples(geometry, dy))


def of_backward_filter(geometry: Geometry, x: jax.Array, dy: jax.Array) -> Problem:
    batch, features = leading_sizes(x, geometry.lhs_spec)
    _, out_features = leading_sizes(dy, geometry.out_spec)
    return Problem(geometry, batch, features, out_features, x.dtype, _examples(geometry, x))


def _examples(geometry: Geometry, array: jax.Array) -> tuple[int, ...]:
    return array.shape[: array.ndim - len(geometry.lhs_spec)]
