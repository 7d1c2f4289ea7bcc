"""The shardings of a call, over axes as fine as they need."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from jaxgrad._src.run.finer_mesh import on_finer_mesh

pytestmark = pytest.mark.jax_version


class _Sharding:
    """A sharding of devices that are numbers. For each dimension it has the number of the shard of each device."""

    is_fully_replicated = False

    def __init__(self, *shards):
        self.shards = [np.ravel(of_axis) for of_axis in shards]

    def devices_indices_map(self, shape):
        def index(size, shards, device):
            shard_size = size // (shards.max() + 1)
            return slice(shards[device] * shard_size, (shards[device] + 1) * shard_size)

        dimensions = list(zip(shape, self.shards, strict=True))
        return {device: tuple(index(*each, device) for each in dimensions) for device in range(len(self.shards[0]))}


def _found(size, *shardings):
    """The shards of each device, for each array and dimension, that the found specs mean, and the found mesh."""
    arrays = [
        SimpleNamespace(shape=(16,) * (2 if sharding is None else len(sharding.shards)), dtype="f4", sharding=sharding)
        for sharding in shardings
    ]
    mesh, found = on_finer_mesh(SimpleNamespace(devices=np.arange(size)), arrays)
    assert mesh.devices.ravel().tolist() == list(range(size))
    coordinates = dict(zip(mesh.axis_names, np.indices(mesh.devices.shape), strict=True))

    def shards(names):
        total = np.zeros(mesh.devices.shape, int)
        for name in (names,) if isinstance(names, str) else names or ():
            total = total * mesh.shape[name] + coordinates[name]
        return total.ravel().tolist()

    return [[shards(names) for names in array.sharding.spec] for array in found], mesh


def _expected(sharding):
    return [shards.tolist() for shards in sharding.shards]


@pytest.mark.parametrize(
    ("sizes", "of_dimensions", "axes"),
    [
        ((8,), [(0,), ()], (8,)),
        ((2, 4), [(0,), (1,)], (2, 4)),
        ((2, 4), [(1,), ()], (2, 4)),
        ((4, 2), [(1, 0), ()], (4, 2)),
        ((2, 3, 4), [(2, 0), (1,)], (2, 3, 4)),
        ((3, 2, 2, 2), [(3, 0), (), (2,)], (3, 2, 2, 2)),
        ((3, 2, 2, 2), [(1, 2, 0), ()], (3, 4, 2)),
    ],
)
def test_shards_over_parts_of_axes(sizes, of_dimensions, axes):
    """Each dimension is split over coordinates of the devices in an array of the given sizes."""
    coordinates = np.indices(sizes)
    shards = []
    for parts in of_dimensions:
        of_dimension = np.zeros(sizes, int)
        for part in parts:
            of_dimension = of_dimension * sizes[part] + coordinates[part]
        shards.append(of_dimension)
    sharding = _Sharding(*shards)
    (whole, found), mesh = _found(np.prod(sizes), None, sharding)
    assert found == _expected(sharding)
    assert not np.any(whole)
    assert mesh.devices.shape == axes


def test_axes_that_several_arrays_need():
    coarse, fine = _Sharding(np.arange(8)), _Sharding(np.arange(8) // 2 % 2)
    found, mesh = _found(8, coarse, fine)
    assert found == [_expected(coarse), _expected(fine)]
    assert mesh.devices.shape == (2, 2, 2)


@pytest.mark.parametrize("shards", [[3, 2, 1, 0], [0, 1, 1, 0], [0, 2, 1, 3, 4, 6, 7, 5], [0, 0, 0, 0, 1, 1]])
def test_shards_that_no_axes_describe(shards):
    (found,), mesh = _found(len(shards), _Sharding(shards, [0] * len(shards)))
    assert not np.any(found)
    assert mesh.size == len(shards)


def test_axes_that_do_not_fit_those_before():
    first, second = _Sharding(np.arange(6) // 2), _Sharding(np.arange(6) // 3)
    found, mesh = _found(6, first, second)
    assert found == [_expected(first), [[0] * 6]]
    assert mesh.devices.shape == (3, 2)
