"""`vmap` of the convolution triangle's units: rows of a batch, features, or examples that share nothing.

Where the weights are mapped too, a unit is called on examples: each array has an axis of them before its own, which may
be split over a mesh as a batch may. The kernels of the CPU take that axis as it is; for the others the examples become
groups of one convolution.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxgrad._conv_geometry import Geometry


def more_examples(
    unit_of: Callable[..., Any], spec: Any, size: int, is_mapped: Sequence[bool | None], arrays: Sequence[Any]
) -> tuple[Any, Any]:
    """A batching rule of every unit: one call with the mapped axis as that of the examples, or as a part of it."""
    arrays = [None if a is None else mapped(a, here, size) for a, here in zip(arrays, is_mapped, strict=True)]
    unit = unit_of(dataclasses.replace(spec, examples=True))
    if spec.examples:
        results = unit(*(None if a is None else fold(a, 0) for a in arrays))
        results = jax.tree.map(lambda r: unfold(r, 0, size), results)
    else:
        results = unit(*arrays)
    return results, jax.tree.map(lambda _: True, results)


def by_groups(
    spec: Any, call_of: Callable[[Geometry], Callable[..., Any]], feature_axes: tuple[int, ...], result_axes: Any
) -> Callable[..., Any]:
    """The call of a geometry, with examples as groups of one convolution; the kernels of the CPU take them as they are.

    Args:
      spec: of the unit.
      call_of: gives the call.
      feature_axes: of each operand, the axis that has the groups.
      result_axes: likewise of the results, a tree as they are.
    """
    if not spec.examples:
        return call_of(spec.geometry)

    def call(*arrays):
        size = arrays[0].shape[0]
        grouped = call_of(spec.geometry.in_groups(size))
        folded = (None if a is None else fold(a, axis) for a, axis in zip(arrays, feature_axes, strict=True))
        return jax.tree.map(lambda result, axis: unfold(result, axis, size), grouped(*folded), result_axes)

    return call


def on_xla(
    spec: Any, call_of: Callable[[Geometry], Callable[..., Any]], feature_axes: tuple[int, ...], result_axes: Any
) -> Callable[..., Any]:
    """The same on XLA, where examples of a product of matrices are a product of as many."""
    if spec.examples and spec.geometry.is_product:
        return jax.vmap(call_of(spec.geometry))
    return by_groups(spec, call_of, feature_axes, result_axes)


def mapped(array: jax.Array, is_mapped: bool | None, size: int) -> jax.Array:
    return array if is_mapped else jnp.broadcast_to(array, (size, *array.shape))


def fold(array: jax.Array, axis: int) -> jax.Array:
    """Merges the mapped axis, the first, into `axis` of the rest, as its slower part."""
    array = jnp.moveaxis(array, 0, axis)
    return array.reshape(*array.shape[:axis], array.shape[axis] * array.shape[axis + 1], *array.shape[axis + 2 :])


def unfold(array: jax.Array, axis: int, size: int) -> jax.Array:
    array = array.reshape(*array.shape[:axis], size, array.shape[axis] // size, *array.shape[axis + 1 :])
    return jnp.moveaxis(array, axis, 0)
