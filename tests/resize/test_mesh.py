"""Resize under `jit` over a mesh and inside `shard_map`, in a fresh interpreter."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from mesh_running import check_shard_map, mesh, on_devices, over, run_checks

import jaxgrad

pytestmark = pytest.mark.jax_version


def _x(*shape):
    return jax.random.normal(jax.random.key(0), shape)


def _loss(x, method="linear"):
    batch, h, w, channels = x.shape
    return jnp.sum(jnp.sin(jaxgrad.resize(x, (batch, 2 * h, w // 3, channels), method)))


def check_a_batch():
    """A split batch or split channels stay split, without collectives."""
    for method in ("nearest", "linear"):
        for explicit in (False, True):
            for spec in (P("d"), P(None, None, None, "d")):
                devices = mesh(explicit=explicit)
                dx, found = over(devices, jax.grad(partial(_loss, method=method)), (_x(16, 5, 6, 8),), (spec,))
                assert not found, found
                assert dx.sharding.is_equivalent_to(NamedSharding(devices, spec), dx.ndim)


def check_a_split_image():
    over(mesh(), jax.grad(_loss), (_x(2, 16, 6, 3),), (P(None, "d"),))


def check_inside_shard_map():
    check_shard_map(_loss, (_x(16, 5, 6, 3),), (P("d"),), (0,))


@on_devices([check_a_batch, check_a_split_image, check_inside_shard_map])
def test_over_a_mesh(run_python, platform, checks):
    run_checks(run_python, platform, __file__, checks)
