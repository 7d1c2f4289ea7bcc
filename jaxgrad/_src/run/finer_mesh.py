"""A mesh as fine as the shardings of a call, which may split a dimension over a part of a mesh axis.

After an array that 8 devices split has been reshaped from [16, C] to [2, 8, C], XLA's partitioner splits the first
dimension in 2 and the second in 4: each over a part of the mesh axis. No `PartitionSpec` over the program's mesh
describes this. One over a mesh of the same devices with the axes 2 and 4 does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec


class _Axis(NamedTuple):
    """Device number d has the coordinate `d // stride % size`, which counts for `weight` shards of a dimension."""

    stride: int
    size: int
    weight: int


def on_finer_mesh(mesh: Mesh, arrays: Sequence[Any]) -> tuple[Mesh, list[jax.ShapeDtypeStruct]]:
    """Returns a mesh of the same devices, in the same order, and the arrays with shardings over it.

    A dimension counts as not split if no axes describe its shards, or none that fit those of the dimensions before it.

    Args:
      mesh: the mesh of the program.
      arrays: shapes, each with any sharding over these devices or None.
    """
    devices = list(mesh.devices.flat)
    strides = {1, len(devices)}
    split: list[list[list[_Axis]]] = []
    for array in arrays:
        split.append([])
        for shards in _shards(array, devices):
            axes = _axes(shards)
            finer = strides.union(*((axis.stride, axis.stride * axis.size) for axis in axes))
            if fits := all(large % small == 0 for small, large in pairwise(sorted(finer))):
                strides = finer
            split[-1].append(axes if fits else [])
    sizes = {small: large // small for small, large in reversed(list(pairwise(sorted(strides))))} or {1: 1}
    finer_mesh = Mesh(np.asarray(devices).reshape(*sizes.values()), tuple(map(_name, sizes)))

    def names(axes: Sequence[_Axis]) -> tuple[str, ...] | None:
        ranges = [range(axis.stride, axis.stride * axis.size) for axis in axes]
        return tuple(_name(stride) for part in ranges for stride in sizes if stride in part) or None

    def sharded(array: Any, split: Sequence[Sequence[_Axis]]) -> jax.ShapeDtypeStruct:
        sharding = NamedSharding(finer_mesh, PartitionSpec(*map(names, split)))
        return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)

    return finer_mesh, [sharded(*pair) for pair in zip(arrays, split, strict=True)]


def _name(stride: int) -> str:
    return f"stride{stride}"


def _shards(array: Any, devices: Sequence[Any]) -> list[np.ndarray]:
    """For each dimension of an array, the number of the shard that each device has."""
    rank = len(array.shape)
    if array.sharding is None or array.sharding.is_fully_replicated:
        return [np.zeros(len(devices), int)] * rank
    # The array itself may have uneven shards, which `devices_indices_map` refuses.
    indices = array.sharding.devices_indices_map((len(devices),) * rank)
    parts = [[index.indices(len(devices)) for index in indices[device]] for device in devices]
    return [np.asarray([start // (stop - start) for start, stop, _ in of_axis]) for of_axis in zip(*parts, strict=True)]


def _axes(shards: np.ndarray) -> list[_Axis]:
    """The axes, the most significant first, that split a dimension such that each device has its shard in `shards`.

    Empty if the dimension is not split, or if no axes describe the shards.
    """
    axes: list[_Axis] = []
    stride = 1
    while shards[0] == 0 and np.any(shards[::stride]):
        stride *= int(np.flatnonzero(shards[::stride])[0])
        rest = shards[::stride]
        weight = int(rest[1])
        counts = rest == weight * np.arange(len(rest))
        size = len(rest) if counts.all() else int(np.argmin(counts))
        axes.append(_Axis(stride, size, weight))
        stride *= size
    devices = np.arange(len(shards))
    described = sum(axis.weight * (devices // axis.stride % axis.size) for axis in axes)
    exact = np.array_equal(described, shards) and math.prod(axis.size for axis in axes) == shards.max() + 1
    return sorted(axes, key=lambda axis: -axis.weight) if exact else []
