"""`group_norm`, `layer_norm` and `rms_norm` over a mesh, in a fresh interpreter."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P
from mesh_cases import batch_norm_args
from mesh_running import check_shard_map, mesh, needs, on_devices, over, run_checks

import jaxgrad

pytestmark = pytest.mark.jax_version

BY = (0, 1, 2, 3)
OPS = {
    "group_norm": partial(jaxgrad.group_norm, num_groups=2, activation="silu"),
    "layer_norm": partial(jaxgrad.layer_norm, activation="gelu"),
    "rms_norm": partial(jaxgrad.rms_norm, activation="relu"),
}


def _loss(op, x, scale, bias, residual):
    return jnp.sum(jnp.sin(OPS[op](x, scale, bias, residual=residual)))


def check_split_samples():
    """Statistics stay local, and dscale and dbias are summed over the mesh."""
    for op, explicit in (("group_norm", False), ("group_norm", True), ("layer_norm", True), ("rms_norm", False)):
        gradient = jax.grad(partial(_loss, op), BY)
        (dx, dscale, *_), found = over(mesh(explicit=explicit), gradient, batch_norm_args(), (P("d"), P(), P(), P("d")))
        assert found == {"all-reduce": 1}, (op, found)
        assert dx.sharding.spec[0] == "d"
        assert dscale.sharding.is_fully_replicated


def check_split_rows():
    """Any axis that is not normalized may be split."""
    spec = P(None, None, "d")
    (dx, *_), found = over(
        mesh(), jax.grad(partial(_loss, "layer_norm"), BY), batch_norm_args(), (spec, P(), P(), spec)
    )
    assert set(found) == {"all-reduce"}, found
    assert dx.sharding.spec == spec


def check_split_space():
    """Statistics of group norm are summed over the mesh."""
    spec = P(None, None, "d")
    for explicit in (False, True):
        gradient = jax.grad(partial(_loss, "group_norm"), BY)
        over(mesh(explicit=explicit), gradient, batch_norm_args(), (spec, P(), P(), spec))


@needs(devices=4)
def check_two_axes():
    spec = P("d", None, "c")
    over(mesh(c=2), jax.grad(partial(_loss, "group_norm"), BY), batch_norm_args(), (spec, P(), P(), spec))


def check_split_channels():
    """They are gathered where a kernel runs; the results are those of one device."""
    x, scale, bias, residual = batch_norm_args()
    x, residual = (jnp.tile(a, 4) for a in (x, residual))
    args, spec = (x, jnp.tile(scale, 4), jnp.tile(bias, 4), residual), P(None, None, None, "d")
    for op in ("group_norm", "rms_norm"):
        over(mesh(), jax.grad(partial(_loss, op), BY), args, (spec, P("d"), P(), spec))


def check_vmap():
    x, scale, bias, residual = batch_norm_args()
    arrays = [jnp.stack([array] * 8) for array in (x, scale, bias, residual)]
    for op, explicit in (("group_norm", True), ("layer_norm", False)):
        _, found = over(mesh(explicit=explicit), jax.vmap(jax.grad(partial(_loss, op), BY)), arrays, (P("d"),) * 4)
        assert not found, (op, found)


def check_inside_shard_map():
    check_shard_map(partial(_loss, "group_norm"), batch_norm_args(), (P("d"), P(), P(), P("d")), BY)


@on_devices(
    [
        check_split_samples,
        check_split_rows,
        check_split_space,
        check_two_axes,
        check_split_channels,
        check_vmap,
        check_inside_shard_map,
    ]
)
def test_over_a_mesh(run_python, platform, checks):
    run_checks(run_python, platform, __file__, checks)
