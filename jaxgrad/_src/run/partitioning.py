"""Partitions a pass over the devices of a mesh.

XLA cannot look into a kernel call: it would gather each sharded operand on every device. A `PartitioningRule` says
which dimensions of a pass may be split, so that each device runs the pass on its shards:

  `jit` over a mesh   `custom_partitioning` passes the rule on to XLA's partitioner (Shardy), which may split over a
                      part of a mesh axis. An operand that is split in another way is gathered first. A result that
                      sums over a split dimension is summed over the mesh.
  explicit axes       a `shard_map` over the explicit axes, split as the types of the operands say. Those that split an
                      axis which `vmap` maps are not known to the call of one example; they are to the batched call.
  `shard_map`         the operands are shards already, and the pass runs on them as they are.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax import lax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from jaxgrad._src.choice.candidates import Candidates
from jaxgrad._src.core.jax_internals import axes_of_vmap
from jaxgrad._src.run.finer_mesh import on_finer_mesh
from jaxgrad._src.run.lowering import platform_call, with_lowering_hook
from jaxgrad._src.run.mesh_axes import MeshAxes, explicit_mesh, in_shard_map

Dims = tuple[str | None, ...]
CrossDevice = Callable[[MeshAxes], Callable[..., Any]]


def dims(rank: int, **axes: int) -> Dims:
    """Names the dimensions of an array that may be split: `dims(4, N=0, C=3)` is `("N", None, None, "C")`."""
    names: list[str | None] = [None] * rank
    for name, axis in axes.items():
        names[axis] = name
    return tuple(names)


@dataclasses.dataclass(frozen=True)
class PartitioningRule:
    """How a pass may be split over a mesh.

    Attributes:
      operands: for each operand the names of its dimensions; a dimension named None is not split. None for an operand
        that is None.
      results: likewise.
      summed: names of dimensions over which a result without them is a sum.
      exchanged: those of the summed dimensions whose shards depend on each other; None for all of them.

    If one mesh axis splits two dimensions, it keeps splitting only the one that is named first.
    """

    operands: tuple[Dims | None, ...]
    results: tuple[Dims | None, ...]
    summed: tuple[str, ...] = ()
    exchanged: tuple[str, ...] | None = None

    def for_operands(self, operands: Sequence[Any]) -> PartitioningRule:
        """The rule of a call, some of whose operands may be None."""
        given = (None if array is None else names for array, names in zip(operands, self.operands, strict=True))
        return dataclasses.replace(self, operands=tuple(given))

    def sharding_rule(self) -> tuple[str, dict[str, tuple[str, ...]]]:
        """The arguments of `custom_partitioning`: the rule with each dimension named, and the kinds of its factors."""
        replicated: list[str] = []

        def named(array: Dims) -> str:
            names = []
            for name in array:
                if name is None:
                    replicated.append(name := f"whole{len(replicated)}")
                names.append(name)
            return " ".join(names)

        operands, results = (
            ", ".join(named(array) for array in arrays if array is not None) for arrays in (self.operands, self.results)
        )
        in_operands, in_results = (
            {name for names in arrays if names is not None for name in names}
            for arrays in (self.operands, self.results)
        )
        summed = tuple(name for name in self.summed if name in in_operands - in_results)
        factors = {"reduction_factors": summed, "need_replication_factors": tuple(replicated)}
        return f"{operands} -> {results}", factors

    def split(self, mesh: Mesh | AbstractMesh, arrays: Sequence[Any]) -> dict[str, tuple[str, ...]]:
        """Returns the mesh axes that split each dimension.

        Args:
          mesh: the mesh of the shardings.
          arrays: the operands and, where their shardings are known, the results, without those that are None.
        """
        found: dict[str, tuple[str, ...]] = {}
        taken: set[str] = set()
        present = [array for array in (*self.operands, *self.results) if array is not None]
        for names, array in zip(present, arrays, strict=False):
            if not isinstance(array.sharding, NamedSharding):  # a program on one device under `jax.set_mesh`
                continue
            for name, size, axes in zip(names, array.shape, array.sharding.spec, strict=True):
                if name is None or axes is None or name in found:
                    continue
                axes = (axes,) if isinstance(axes, str) else tuple(axes)
                # XLA pads uneven shards with undefined values, which a kernel would read.
                even = size % math.prod(mesh.shape[axis] for axis in axes) == 0
                if even and taken.isdisjoint(axes):
                    found[name] = axes
                    taken.update(axes)
        return found

    def result_specs(self, split: dict[str, tuple[str, ...]]) -> list[PartitionSpec]:
        """The partition specs of the results that are not None."""
        return [_spec(names, split) for names in self.results if names is not None]

    def reshard(self, mesh: AbstractMesh, operands: Sequence[Any]) -> tuple[Any, ...]:
        """Returns the operands, some of which may be None, sharded over explicit axes as the rule splits them.

        JAX requires that the gradient of an operand has the sharding of the operand. The operands of a `custom_vjp`
        function are resharded before it is called. Its gradient passes split the same dimensions, and the transpose of
        `jax.sharding.reshard` restores the sharding that the caller's operand has.
        """
        given = [array for array in operands if array is not None]
        rule = self.for_operands(operands)
        specs = rule.operand_specs(rule.split(mesh, [jax.typeof(array) for array in given]))
        shardings = [NamedSharding(mesh, spec) for spec in specs]
        resharded = iter(jax.sharding.reshard(given, shardings))
        return tuple(None if array is None else next(resharded) for array in operands)

    def operand_specs(self, split: dict[str, tuple[str, ...]]) -> list[PartitionSpec]:
        """The partition specs of the operands that are not None."""
        return [_spec(names, split) for names in self.operands if names is not None]


def _spec(names: Dims, split: dict[str, tuple[str, ...]]) -> PartitionSpec:
    return PartitionSpec(*(None if name is None else split.get(name) for name in names))


def partitioned(
    rule: PartitioningRule,
    candidates: Callable[..., Candidates],
    kernels: Mapping[str, Callable[..., Any]],
    xla: Callable[..., Any],
    cross_device: CrossDevice | None = None,
    xla_is_worse: Callable[..., bool] = lambda *_: False,
) -> Callable[..., Any]:
    """Returns a pass that runs the candidate's kernel on each device's shards.

    If there is no candidate, and XLA's partitioner splits `xla` as well as the rule does, the pass is `xla` alone.

    Args:
      rule: how the pass may be split.
      candidates: the candidates for operands of given sizes, which may be those of a shard.
      kernels: by implementation, the kernel call.
      xla: the same function on XLA.
      cross_device: for the mesh axes that split the rule's exchanged dimensions, what each device computes of its
        shards. By default the pass itself, whose results are then summed.
      xla_is_worse: whether, for operands of given sizes, XLA's partitioner would gather what the rule splits, or
        communicate more often than `cross_device`.
    """

    def local(*arrays: Any) -> Any:
        return platform_call(candidates(*arrays), kernels, xla, *arrays)

    def call(*arrays: Any) -> Any:
        if in_shard_map():
            return local(*arrays)
        given = rule.for_operands(arrays)
        if mesh := _mesh_of_explicit_axes(arrays):
            axes = set(mesh.explicit_axes) - axes_of_vmap()
            return _over_explicit_axes(mesh, axes, local, given, cross_device, arrays) if axes else local(*arrays)
        found = candidates(*arrays)
        # Checked here too: an error raised while XLA partitions the pass would reach the user as an error of XLA.
        arrays = with_lowering_hook(found.for_whole_arrays(), arrays)
        # A tuning may choose otherwise for the shards.
        follows_rule = found.implementations or found.tuning is not None or xla_is_worse(*arrays)
        return (_custom_partitioned(local, given, cross_device) if follows_rule else xla)(*arrays)

    return call


def _custom_partitioned(
    local: Callable[..., Any], rule: PartitioningRule, cross_device: CrossDevice | None
) -> Callable[..., Any]:
    def partition(mesh: Mesh, operands: Any, results: Any) -> tuple[Any, ...]:
        finer_mesh, arrays = on_finer_mesh(mesh, jax.tree.leaves((operands, results)))
        split = rule.split(finer_mesh, arrays)

        def shardings(arrays: Any, specs: Sequence[PartitionSpec]) -> Any:
            return jax.tree.unflatten(jax.tree.structure(arrays), [NamedSharding(finer_mesh, spec) for spec in specs])

        return (
            finer_mesh,
            _on_shards(local, rule, cross_device, split),
            shardings(results, rule.result_specs(split)),
            shardings(operands, rule.operand_specs(split)),
        )

    sharding_rule, factors = rule.sharding_rule()
    call = custom_partitioning(local)
    call.def_partition(partition, decode_shardings=False, sharding_rule=sharding_rule, **factors)
    return call


def _on_shards(
    local: Callable[..., Any],
    rule: PartitioningRule,
    cross_device: CrossDevice | None,
    split: dict[str, tuple[str, ...]],
) -> Callable[..., Any]:
    """The computation of each device on its shards, where the mesh splits the pass as in `split`."""

    exchanged = rule.summed if rule.exchanged is None else rule.exchanged
    exchanged_axes = tuple(axis for name in exchanged for axis in split.get(name, ()))
    run, rest = local, rule.summed
    if exchanged_axes and cross_device is not None:
        run, rest = cross_device(MeshAxes(exchanged_axes)), tuple(n for n in rule.summed if n not in exchanged)

    def summed(result: jax.Array, names: Dims) -> jax.Array:
        axes = tuple(axis for name in rest if name not in names for axis in split.get(name, ()))
        return lax.psum(result, axes) if axes else result

    def call(*arrays: Any) -> Any:
        leaves, tree = jax.tree.flatten(run(*arrays))
        present = [names for names in rule.results if names is not None]
        return jax.tree.unflatten(tree, [summed(*pair) for pair in zip(leaves, present, strict=True)])

    return call


def _mesh_of_explicit_axes(arrays: Sequence[Any]) -> AbstractMesh | None:
    """The mesh of `jax.set_mesh`, or of the operands' types without it, if it has explicit axes; otherwise None."""
    mesh = jax.sharding.get_abstract_mesh()
    return mesh if mesh.explicit_axes else explicit_mesh(*arrays)


def _over_explicit_axes(
    mesh: AbstractMesh,
    axes: set[str],
    local: Callable[..., Any],
    rule: PartitioningRule,
    cross_device: CrossDevice | None,
    arrays: Sequence[Any],
) -> Any:
    """A call over explicit axes of a mesh, where the types of the operands say how they are split."""
    given = [array for array in arrays if array is not None]
    split = rule.split(mesh, [jax.typeof(array) for array in given])
    specs = rule.operand_specs(split)
    trees = []

    def leaves(*given: Any) -> list[jax.Array]:
        rest = iter(given)
        operands = (None if array is None else next(rest) for array in arrays)
        found, tree = jax.tree.flatten(_on_shards(local, rule, cross_device, split)(*operands))
        trees.append(tree)
        return found

    call = jax.shard_map(
        leaves,
        mesh=mesh,
        in_specs=tuple(specs),
        out_specs=rule.result_specs(split),
        axis_names=axes,
        check_vma=False,
    )
    shardings = [NamedSharding(mesh, spec) for spec in specs]
    found = call(*(jax.sharding.reshard(array, sharding) for array, sharding in zip(given, shardings, strict=True)))
    return jax.tree.unflatten(trees[-1], found)
