"""Inside `shard_map`: collectives over mesh axes, and the varying manual axes of arrays. Elsewhere: explicit axes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, NamedSharding


@dataclasses.dataclass(frozen=True)
class MeshAxes:
    """Mesh axes for collectives, optionally split into groups of devices as `axis_index_groups` of `jax.lax.psum`."""

    axes: tuple[str, ...]
    groups: tuple[tuple[int, ...], ...] | None = None

    @property
    def size(self) -> int:
        """The number of devices in each collective."""
        return lax.axis_size(self.axes) if self.groups is None else len(self.groups[0])

    def psum(self, arrays: Any) -> Any:
        return lax.psum(arrays, self.axes, axis_index_groups=self.groups)

    def pmean(self, arrays: Any) -> Any:
        return jax.tree.map(lambda total: total / self.size, self.psum(arrays))

    def all_gather_by_psum(self, arrays: Any) -> Any:
        """Gathers arrays along a new first axis by a sum: JAX then knows that the result is the same on all devices."""
        index = lax.axis_index(self.axes)
        if self.groups is not None:
            indices = {device: i for group in self.groups for i, device in enumerate(group)}
            index = jnp.asarray([indices[device] for device in range(len(indices))])[index]
        is_own = jnp.arange(self.size) == index

        def in_own_row(array: jax.Array) -> jax.Array:
            return jnp.where(lax.expand_dims(is_own, range(1, 1 + array.ndim)), array[None], 0)

        return self.psum(jax.tree.map(in_own_row, arrays))

    def psum_cotangent(self, cotangent: Any, operand: jax.Array) -> Any:
        """Sums the cotangent of a result that is the same on all devices, unless JAX has done so.

        Where `shard_map` checks varying axes, which shows in `operand`, an operand of the same operation, JAX has.
        """
        summed = cotangent is None or _varying_axes(operand).issuperset(self.axes)
        return cotangent if summed else self.psum(cotangent)

    def pvary(self, array: jax.Array) -> jax.Array:
        """Marks an array as varying over the axes, where `shard_map` checks varying axes."""
        return _pvary(array, frozenset(self.axes))


def in_shard_map() -> bool:
    """Whether the code being traced runs on each device's shard: inside `shard_map` or `pmap`."""
    return bool(jax.sharding.get_abstract_mesh().manual_axes)


def explicit_mesh(*arrays: Any) -> AbstractMesh | None:
    """The mesh with explicit axes that the types of the arrays name, or None; some arrays may be None.

    It need not be the mesh of `jax.set_mesh`: a committed array names its own.
    """
    for array in arrays:
        if array is not None and (mesh := jax.typeof(array).sharding.mesh).explicit_axes:
            return mesh
    return None


def explicit_sharding_of(aval: Any) -> NamedSharding | None:
    """The sharding of an abstract array over explicit mesh axes; None if it has none."""
    sharding = getattr(aval, "sharding", None)
    return sharding if isinstance(sharding, NamedSharding) and sharding.mesh.explicit_axes else None


def pvary_to_match(*arrays: Any) -> tuple[Any, ...]:
    """Returns the arrays, each marked as varying over every mesh axis that one of them varies over. None stays None.

    The operands of a `custom_vjp` function are matched before it is called: the transpose of the mark is the sum over
    the mesh that the gradient of a replicated operand needs.
    """
    if not in_shard_map():
        return arrays
    axes = _varying_axes(*arrays)
    return tuple(_pvary(array, axes) for array in arrays)


def results_vary_as_operands(call: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a kernel call, whose results carry no varying axes, so that they vary as its operands do."""

    def wrapped(*arrays: Any) -> Any:
        results = call(*arrays)
        if not in_shard_map():
            return results
        axes = _varying_axes(*arrays)
        return jax.tree.map(lambda result: _pvary(result, axes), results)

    return wrapped


def _varying_axes(*arrays: Any) -> frozenset[str]:
    """The mesh axes that any of the arrays varies over; some arrays may be None."""
    axes = (jax.typeof(array).manual_axis_type.varying for array in arrays if array is not None)
    return frozenset[str]().union(*axes)


def _pvary(array: Any, axes: frozenset[str]) -> Any:
    if array is None:
        return None
    missing = tuple(sorted(axes - _varying_axes(array)))
    return lax.pcast(array, missing, to="varying") if missing else array
