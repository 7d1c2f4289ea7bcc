"""What a unit does with arrays that are spread over the devices of a mesh.

XLA cannot look into a kernel's call: of sharded operands it would gather each one whole on every device. A `Layout`
says which dimensions of a unit may be split, so that each device runs the unit on its own part:

  `jit` over a mesh   `custom_partitioning` tells XLA's partitioner (Shardy) of the layout. What is split otherwise is
                      gathered first, and what adds up over a split dimension is summed over the mesh.
  `shard_map`         the operands are each device's own part already, and the unit runs on them as they are. Its
                      results are marked as varying over the mesh's axes, as those of any other operation are.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from jaxgrad import _ffi
from jaxgrad._dispatch import Route, by_platform, on_forced_platform

Dims = tuple[str | None, ...]


def dims(rank: int, **axes: int) -> Dims:
    """The dimensions of an array, by the axes that those lie along which may be split: `dims(4, N=0, C=3)`."""
    names: list[str | None] = [None] * rank
    for name, axis in axes.items():
        names[axis] = name
    return tuple(names)


@dataclasses.dataclass(frozen=True)
class Layout:
    """How a unit may be split over a mesh.

    Attributes:
      operands: for each operand the names of its dimensions, None for one that each device needs as a whole.
      results: likewise; None for a result that is None.
      summed: the dimensions over which a result that does not have them is a sum.

    Where one axis of a mesh would split two dimensions, it splits the one that is named first.
    """

    operands: tuple[Dims | None, ...]
    results: tuple[Dims | None, ...]
    summed: tuple[str, ...] = ()

    def of(self, operands: Sequence[Any]) -> Layout:
        """The layout of a call, some of whose operands may be None."""
        given = (None if array is None else names for array, names in zip(operands, self.operands, strict=True))
        return dataclasses.replace(self, operands=tuple(given))

    def rule(self) -> tuple[str, dict[str, tuple[str, ...]]]:
        """As `custom_partitioning` takes it: each dimension named, and what the names stand for."""
        whole: list[str] = []

        def named(array: Dims) -> str:
            names = []
            for name in array:
                if name is None:
                    whole.append(name := f"whole{len(whole)}")
                names.append(name)
            return " ".join(names)

        operands, results = (
            ", ".join(named(array) for array in arrays if array is not None) for arrays in (self.operands, self.results)
        )
        taken, given = (
            {name for names in arrays if names is not None for name in names}
            for arrays in (self.operands, self.results)
        )
        summed = tuple(name for name in self.summed if name in taken - given)
        factors = {"reduction_factors": summed, "need_replication_factors": tuple(whole)}
        return f"{operands} -> {results}", factors

    def split(self, mesh: Mesh | AbstractMesh, arrays: Sequence[Any]) -> dict[str, tuple[str, ...]]:
        """By dimension, the axes of the mesh that split it.

        Args:
          mesh: that of the shardings.
          arrays: the operands and, where their shardings are known, the results, those that are not None.
        """
        found: dict[str, tuple[str, ...]] = {}
        taken: set[str] = set()
        present = [array for array in (*self.operands, *self.results) if array is not None]
        for names, array in zip(present, arrays, strict=False):
            for name, size, axes in zip(names, array.shape, array.sharding.spec, strict=True):
                if name is None or axes is None or name in found:
                    continue
                axes = (axes,) if isinstance(axes, str) else tuple(axes)
                # Parts of several sizes would be padded, and with what nobody knows.
                even = size % math.prod(mesh.shape[axis] for axis in axes) == 0
                if even and taken.isdisjoint(axes):
                    found[name] = axes
                    taken.update(axes)
        return found

    def results_split(self, split: dict[str, tuple[str, ...]]) -> list[PartitionSpec]:
        """How the results lie that are not None."""
        return [_spec(names, split) for names in self.results if names is not None]

    def operands_split(self, split: dict[str, tuple[str, ...]]) -> list[PartitionSpec]:
        """How the operands must lie that are not None."""
        return [_spec(names, split) for names in self.operands if names is not None]


def _spec(names: Dims, split: dict[str, tuple[str, ...]]) -> PartitionSpec:
    return PartitionSpec(*(None if name is None else split.get(name) for name in names))


def over_mesh(
    layout: Layout,
    route: Callable[..., Route],
    kernels: Mapping[str, Callable[..., Any]],
    xla: Callable[..., Any],
    across: Callable[[Devices], Callable[..., Any]] | None = None,
    xla_is_worse: Callable[..., bool] = lambda *_: False,
) -> Callable[..., Any]:
    """A unit that takes the kernel of its route, as `by_platform` does, on each device's part of the operands.

    Where the route takes none, and XLA's partitioner splits `xla` as well as the layout does, it is `xla` alone.

    Args:
      layout: of the operands and results.
      route: for operands of given sizes, which may be a device's part.
      kernels: by implementation, what to call.
      xla: what to call on every other platform.
      across: for the devices that share the dimensions which are summed, what each of them calls; by default the unit
        itself, whose results are then summed.
      xla_is_worse: whether, of operands of given sizes, XLA's partitioner would gather what the layout splits, or
        exchange more often than `across`.
    """

    def local(*arrays: Any) -> Any:
        return on_own_part(route(*arrays), kernels, xla, *arrays)

    def unit(*arrays: Any) -> Any:
        if in_shard_map():
            return local(*arrays)
        given = layout.of(arrays)
        if jax.sharding.get_abstract_mesh().explicit_axes:
            return _over_explicit_axes(local, given, across, arrays)
        found = route(*arrays)
        # Here too: an error that is raised while XLA partitions the unit reaches the user as one of XLA's own.
        arrays = on_forced_platform(found, arrays)
        follows = found.kernels or xla_is_worse(*arrays)
        return (_partitioned(local, given, across) if follows else xla)(*arrays)

    return unit


def jitted(unit: Callable[..., Any], name: str, *identity: Any) -> Callable[..., Any]:
    """`jax.jit` of a unit, under a name that no other unit has, and that is the same in every process.

    Over a mesh a program's text holds the address of a callback in the place of the unit. JAX can be told to leave such
    addresses out of the keys of its persistent cache; the name is then what tells programs apart whose units take
    arrays of the same shapes.

    Args:
      unit: that of `over_mesh`.
      name: what it computes.
      identity: everything else that it depends on, beside the shapes: what prints alike is alike.
    """
    digest = hashlib.sha256(repr((identity, _ffi.builds())).encode()).hexdigest()[:16]

    def call(*arrays: Any) -> Any:
        return unit(*arrays)

    call.__name__ = call.__qualname__ = f"jaxgrad.{name}.{digest}"
    return jax.jit(call)


def on_own_part(route: Route, kernels: Mapping[str, Callable[..., Any]], xla: Callable[..., Any], *arrays: Any) -> Any:
    """`by_platform`, with results that are marked as varying as the operands do."""
    alike = {name: _marked_alike(kernel) for name, kernel in kernels.items()}
    return by_platform(route, alike, _marked_alike(xla), *arrays)


def _partitioned(
    local: Callable[..., Any], layout: Layout, across: Callable[[Devices], Callable[..., Any]] | None
) -> Callable[..., Any]:
    def partition(mesh: Mesh, operands: Any, results: Any) -> tuple[Any, ...]:
        split = layout.split(mesh, jax.tree.leaves((operands, results)))

        def shardings(arrays: Any, specs: Sequence[PartitionSpec]) -> Any:
            return jax.tree.unflatten(jax.tree.structure(arrays), [NamedSharding(mesh, spec) for spec in specs])

        return (
            mesh,
            _part(local, layout, across, split),
            shardings(results, layout.results_split(split)),
            shardings(operands, layout.operands_split(split)),
        )

    rule, factors = layout.rule()
    call = custom_partitioning(local)
    call.def_partition(partition, sharding_rule=rule, **factors)
    return call


def _part(
    local: Callable[..., Any],
    layout: Layout,
    across: Callable[[Devices], Callable[..., Any]] | None,
    split: dict[str, tuple[str, ...]],
) -> Callable[..., Any]:
    """What each device computes of its own part, where a mesh splits the unit so."""

    def summed(result: jax.Array, names: Dims) -> jax.Array:
        axes = tuple(axis for name in layout.summed if name not in names for axis in split.get(name, ()))
        return lax.psum(result, axes) if axes else result

    def part(*arrays: Any) -> Any:
        axes = tuple(axis for name in layout.summed for axis in split.get(name, ()))
        if axes and across is not None:
            return across(Devices(axes))(*arrays)
        leaves, tree = jax.tree.flatten(local(*arrays))
        present = [names for names in layout.results if names is not None]
        return jax.tree.unflatten(tree, [summed(*pair) for pair in zip(leaves, present, strict=True)])

    return part


def _over_explicit_axes(
    local: Callable[..., Any],
    layout: Layout,
    across: Callable[[Devices], Callable[..., Any]] | None,
    arrays: Sequence[Any],
) -> Any:
    """A call under a mesh with explicit axes, where the types of the operands say how they are split."""
    mesh = jax.sharding.get_abstract_mesh()
    given = [array for array in arrays if array is not None]
    split = layout.split(mesh, [jax.typeof(array) for array in given])
    specs = layout.operands_split(split)
    trees = []

    def leaves(*given: Any) -> list[jax.Array]:
        rest = iter(given)
        found = _part(local, layout, across, split)(*(None if array is None else next(rest) for array in arrays))
        found, tree = jax.tree.flatten(found)
        trees.append(tree)
        return found

    call = jax.shard_map(
        leaves,
        in_specs=tuple(specs),
        out_specs=layout.results_split(split),
        axis_names=set(mesh.explicit_axes),
        check_vma=False,
    )
    found = call(*(jax.sharding.reshard(array, spec) for array, spec in zip(given, specs, strict=True)))
    return jax.tree.unflatten(trees[-1], found)


# --- inside shard_map ---------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Devices:
    """Those along axes of a mesh, or of those the groups that each device is in one of."""

    axes: tuple[str, ...]
    groups: tuple[tuple[int, ...], ...] | None = None

    @property
    def count(self) -> int:
        return lax.axis_size(self.axes) if self.groups is None else len(self.groups[0])

    def sum(self, arrays: Any) -> Any:
        return lax.psum(arrays, self.axes, axis_index_groups=self.groups)

    def mean(self, arrays: Any) -> Any:
        return jax.tree.map(lambda total: total / self.count, self.sum(arrays))

    def rows(self, arrays: Any) -> Any:
        """Those of all of them, [count, C] for each [C]: by a sum, so that JAX knows it to be the same everywhere."""
        place = lax.axis_index(self.axes)
        if self.groups is not None:
            places = {device: i for group in self.groups for i, device in enumerate(group)}
            place = jnp.asarray([places[device] for device in range(len(places))])[place]
        own = jnp.arange(self.count)[:, None] == place
        return self.sum(jax.tree.map(lambda array: jnp.where(own, array, 0), arrays))

    def sum_of_cotangents(self, cotangent: Any, marked: jax.Array) -> Any:
        """Of a result that is the same on all of them, in the backward pass of an operation of which `marked` is an
        operand: where JAX tells by marks which arrays differ, it has summed the cotangent already."""
        summed = cotangent is None or _varying(marked).issuperset(self.axes)
        return cotangent if summed else self.sum(cotangent)

    def mark(self, array: jax.Array) -> jax.Array:
        """Marked as differing between them, where `shard_map` checks marks."""
        return _vary_over(array, frozenset(self.axes))


def in_shard_map() -> bool:
    """Whether what is traced runs on each device's own part: inside `shard_map` or `pmap`."""
    return bool(jax.sharding.get_abstract_mesh().manual_axes)


def _varying(*arrays: Any) -> frozenset[str]:
    """The axes of the mesh that any of the arrays varies over; some may be None."""
    marks = (jax.typeof(array).manual_axis_type.varying for array in arrays if array is not None)
    return frozenset[str]().union(*marks)


def vary_alike(*arrays: Any) -> tuple[Any, ...]:
    """The arrays, all marked as varying over each axis of the mesh that one of them varies over; None stays None.

    The operands of a `custom_vjp` are made alike before it: the transpose of the mark is the sum over the mesh, which
    the gradient of an operand that all devices share is.
    """
    if not in_shard_map():
        return arrays
    axes = _varying(*arrays)
    return tuple(_vary_over(array, axes) for array in arrays)


def _vary_over(array: Any, axes: frozenset[str]) -> Any:
    if array is None:
        return None
    missing = tuple(sorted(axes - _varying(array)))
    return lax.pcast(array, missing, to="varying") if missing else array


def _marked_alike(call: Callable[..., Any]) -> Callable[..., Any]:
    """`call` with results that vary as its operands do; what a kernel returns carries no marks."""

    def marked(*arrays: Any) -> Any:
        axes = _varying(*arrays)
        return jax.tree.map(lambda result: _vary_over(result, axes), call(*arrays))

    return marked
