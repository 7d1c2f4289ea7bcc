"""The readings of an equation of `jax.lax.conv_general_dilated`: every pass that computes it.

JAX writes gradients as convolutions: the input gradient with input dilation and a reversed window, the weight gradient
with the batch as features and a window as large as dy. The shapes alone leave open which pass an equation is: the
weight gradient of a window as large as its input has the shapes of a forward pass. The layouts show who wrote it
(conv/read/fastest.py).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import jax

from jaxgrad._src.conv.call.params import ConvParams
from jaxgrad._src.conv.read.fastest import (
    is_written_as_input_gradient,
    is_written_as_weight_gradient,
    prefers_product_of_patches,
    prefers_weight_gradient,
    prefers_window,
    worth_measuring,
)
from jaxgrad._src.conv.read.pass_calls import (
    ConvArguments,
    PassCall,
    forward_call,
    input_gradient_call,
    weight_gradient_call,
)
from jaxgrad._src.run.batching import fold, unfold


@dataclasses.dataclass(frozen=True)
class Reading:
    """A pass that computes the equation, after its batch groups become feature groups.

    With batch groups, `of_one_group` is the pass of a single group.
    """

    call: PassCall
    arguments: ConvArguments
    batch_groups: int = 1
    of_one_group: PassCall | None = None

    @property
    def is_weight_gradient(self) -> bool:
        return self.call.pass_name == "weight_gradient"

    @property
    def is_of_transposed(self) -> bool:
        """Whether it is the weight gradient of a transposed convolution, for which XLA has no kernel as JAX writes it.

        JAX writes it with input dilation; on_xla/xla.py as the weight gradient of the convolution that is transposed.
        """
        return self.is_weight_gradient and self.arguments.is_input_dilated

    @property
    def is_depthwise(self) -> bool:
        """Whether the pass has groups of one input and one output feature."""
        a, groups = self.arguments, self.call.geometry.feature_group_count
        of_lhs = a.dimension_numbers.lhs_spec[0 if self.is_weight_gradient else 1]  # a weight gradient swaps the axes
        return groups > 1 and groups == a.lhs_shape[of_lhs] == a.rhs_shape[a.dimension_numbers.rhs_spec[0]]

    def is_same_kind(self, other: Reading) -> bool:
        """Whether both are weight gradients, or both loop over the window of rhs."""
        return self.is_weight_gradient == other.is_weight_gradient

    def regrouped(self, lhs: jax.Array) -> jax.Array:
        if self.batch_groups == 1:
            return lhs
        batch, feature, *_ = self.arguments.dimension_numbers.lhs_spec
        return fold(unfold(lhs, batch, self.batch_groups), feature)

    def compute(self, params: ConvParams, lhs: jax.Array, rhs: jax.Array, partitioned: bool = False) -> jax.Array:
        """The result. In a partitioned program, batch groups are independent problems, which a mesh may split."""
        if self.of_one_group is None or not partitioned:
            return self.call.compute(params, self.regrouped(lhs), rhs)
        of_lhs, of_rhs, of_result = self.arguments.dimension_numbers
        params = dataclasses.replace(params, geometry=self.of_one_group.geometry)
        groups = unfold(lhs, of_lhs[0], self.batch_groups), unfold(rhs, of_rhs[0], self.batch_groups)
        return fold(jax.vmap(partial(self.of_one_group.compute, params))(*groups), of_result[1])


def written_first(a: ConvArguments) -> list[Reading]:
    """All readings. The first one is the pass that JAX or the program has written."""
    by_window, gradient = list(_by_window(a)), list(_as_weight_gradient(a))
    return gradient + by_window if is_written_as_weight_gradient(a.dimension_numbers.lhs_spec) else by_window + gradient


def fastest_first(readings: Sequence[Reading]) -> list[Reading]:
    """The readings among which the tables of preferences choose, the fastest first, of readings as written.

    A matrix product is the fastest, then a pass that is depthwise, then the pass as it is written. Another kind of
    reading, by the window or as a weight gradient, is among them only if it comes first: no table compares the kinds.
    """
    written = readings[0]
    a = written.arguments
    as_weight_gradient = (
        not prefers_window(a.window, a.out_spatial, a.feature_group_count)
        if written.is_weight_gradient
        else prefers_weight_gradient(a.window, a.out_spatial)
    )

    def rank(reading: Reading) -> tuple[bool, bool, bool]:
        product = _is_product(reading, is_as_written=reading.is_same_kind(written))
        return not product, not reading.is_depthwise, reading.is_weight_gradient != as_weight_gradient

    ranked = sorted(readings, key=rank)
    return [each for each in ranked if each.is_same_kind(ranked[0]) or each.is_same_kind(written)]


def measurable(readings: Sequence[Reading]) -> list[Reading]:
    """The readings that may be the fastest, of readings as written."""
    written = readings[0]

    def is_measurable(reading: Reading) -> bool:
        window, out_spatial = reading.arguments.window, reading.arguments.out_spatial
        return reading.is_same_kind(written) or worth_measuring(window, out_spatial, reading.is_weight_gradient)

    return [reading for reading in readings if is_measurable(reading)]


def _is_product(reading: Reading, *, is_as_written: bool) -> bool:
    """Whether the pass is a matrix product of operands that need not be transposed first."""
    a, g = reading.arguments, reading.call.geometry
    if g.is_matrix_product:
        return is_as_written
    if not g.has_disjoint_windows:
        return False
    return not reading.is_weight_gradient or prefers_product_of_patches(a.window, a.out_spatial, a.lhs_spatial)


def _as_weight_gradient(a: ConvArguments) -> Iterator[Reading]:
    if not a.is_input_dilated or max(a.rhs_dilation) == 1:
        yield Reading(weight_gradient_call(a), a)


def _by_window(a: ConvArguments) -> Iterator[Reading]:
    """The readings as a forward pass and as an input gradient."""
    groups = a.batch_group_count
    of_one_group = dataclasses.replace(a, batch_group_count=1)  # of the features, calls take the number of groups only
    if groups > 1:
        lhs_shape = list(a.lhs_shape)
        batch, feature, *_ = a.dimension_numbers.lhs_spec
        lhs_shape[batch] //= groups
        lhs_shape[feature] *= groups
        a = dataclasses.replace(a, lhs_shape=tuple(lhs_shape), feature_group_count=groups, batch_group_count=1)

    def reading(call_of: Callable[[ConvArguments], PassCall]) -> Reading:
        return Reading(call_of(a), a, groups, call_of(of_one_group) if groups > 1 else None)

    forward = [] if a.is_input_dilated else [reading(forward_call)]
    reverses = is_written_as_input_gradient(*a.dimension_numbers[:2])  # JAX wrote it, and reversed rhs
    transposed = [] if a.is_strided else [reading(partial(input_gradient_call, rhs_is_reversed=reverses))]
    yield from (*transposed, *forward) if reverses else (*forward, *transposed)
