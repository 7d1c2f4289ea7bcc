"""The GRU under `jit` over a mesh and inside `shard_map`, in a fresh interpreter."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import pytest
from backends import gru
from jax.sharding import PartitionSpec as P
from mesh_running import OWN_KERNEL, check_reshaped_batch, check_shard_map, mesh, on_devices, over, run_checks

pytestmark = pytest.mark.jax_version

T, B, I, H = 5, 16, 8, 6  # noqa: E741
FULL = {"direction": "bidirectional", "linear_before_reset": True, "clip": 2.0}
SPECS = (P(None, "d"), P(), P(), P(), P("d"), *[P(None, "d")] * 3)  # in the order of gru_cases.Inputs
BY = (0, 1, 2, 3, 5, 7)


def _args(D):
    keys = jax.random.split(jax.random.key(0), 7)
    shapes = (T, B, I), (D, 3 * H, I), (D, 3 * H, H), (D, 6 * H), (D, B, H), (D, B, H)
    arrays = (jax.random.normal(key, s) / 2 for key, s in zip(keys[1:], shapes, strict=True))
    x, *weights, initial_h, reset_h = arrays
    reset = jax.random.bernoulli(keys[0], 0.3, (T, B))
    return x, *weights, jnp.arange(B) % (T + 1), initial_h, reset, reset_h


def _loss(*args, implementation=OWN_KERNEL, **settings):
    y, y_h = gru(*args, implementation=implementation, **settings)
    return jnp.sum(jnp.sin(y)) + jnp.sum(y_h**2)


def check_a_batch():
    """No row moves between devices, and one all-reduce sums the weight gradients."""
    args = _args(2)
    for explicit in (False, True):
        (dx, dw, *_), found = over(mesh(explicit=explicit), jax.grad(partial(_loss, **FULL), BY), args, SPECS)
        assert found == {"all-reduce": 1}, found
        assert dx.sharding.spec[1] == "d"
        assert dw.sharding.is_fully_replicated
    short = slice(0, 3)  # the required arrays alone
    _, found = over(mesh(), jax.grad(_loss, (0, 1, 2)), _args(1)[short], SPECS[short])
    assert found == {"all-reduce": 1}, found
    _, found = over(mesh(), partial(gru, implementation=OWN_KERNEL, **FULL), args, SPECS)
    assert not found, found


def check_a_batch_before_the_steps():
    specs = (P("d"), P(), P(), P(), *[P("d")] * 4)
    for settings in FULL, {}:
        x, w, r, b, lens, *rows = _args(2 if settings else 1)
        args = jnp.swapaxes(x, 0, 1), w, r, b, lens, *(jnp.swapaxes(array, 0, 1) for array in rows)
        gradient = jax.grad(partial(_loss, **settings, time_major=False), BY)
        for explicit in (False, True):
            (dx, *_), found = over(mesh(explicit=explicit), gradient, args, specs)
            assert found == {"all-reduce": 1}, found
            assert dx.sharding.spec[0] == "d"


def check_a_reshaped_batch():
    check_reshaped_batch(_loss, _args(1)[:3], batch=1)


def check_plain_xla():
    over(mesh(explicit=True), jax.grad(partial(_loss, implementation="xla", **FULL), BY), _args(2), SPECS)


def check_sharded_features():
    over(mesh(), jax.grad(partial(_loss, **FULL), BY), _args(2), (P(None, None, "d"), P(None, None, "d"), *[P()] * 6))


def check_transformations():
    args = _args(1)

    def penalty(*args):
        return sum(jnp.sum(g**2) for g in jax.grad(_loss, (0, 1))(*args))

    over(mesh(), jax.grad(penalty, BY), args, SPECS)

    def one(x, h, reset):
        return gru(x[:, None], *args[1:4], None, h[:, None], reset[:, None], implementation=OWN_KERNEL)

    _, found = over(mesh(), jax.vmap(one, 1), (args[0], args[5], args[6]), (P(None, "d"),) * 3)
    assert not found, found


def check_groups_of_weights():
    """A population over the mesh: no device needs the weights or the gradients of another."""
    arrays = [jnp.stack([array] * 8) for array in _args(1)[:4]]
    gradients = jax.vmap(jax.grad(_loss, (1, 2)))
    for explicit in (False, True):
        (dw, dr), found = over(mesh(explicit=explicit), gradients, arrays, (P("d"),) * 4)
        assert not found, found
        assert dw.sharding.spec[0] == dr.sharding.spec[0] == "d"
    inside = jax.shard_map(gradients, mesh=mesh(), in_specs=P("d"), out_specs=P("d"))
    (dw, dr), found = over(mesh(), lambda *args: inside(*args), arrays, (P("d"),) * 4)
    assert not found, found


def check_groups_of_weights_beside_rows():
    """Both may be split, and the only collective sums the gradients over the rows."""
    arrays = [jnp.stack([array] * 8) for array in _args(1)[:4]]
    specs = P("d", None, "e"), P("d"), P("d"), P("d")
    for explicit in (False, True):
        _, found = over(mesh(explicit=explicit, e=2), jax.vmap(jax.grad(_loss, (1, 2))), arrays, specs)
        assert found == {"all-reduce": 1}, found


def check_per_example_gradients():
    """The examples stay on their devices, and so do the gradients."""
    x, *weights = _args(1)[:4]
    xs = jnp.stack([x, *[2 * x] * 7])
    gradients = jax.vmap(jax.grad(_loss, (0, 1, 2, 3)), (0, None, None, None))
    for explicit in (False, True):
        found, collectives = over(mesh(explicit=explicit), gradients, (xs, *weights), (P("d"), P(), P(), P()))
        assert not collectives, collectives
        assert all(gradient.sharding.spec[0] == "d" for gradient in found)


def check_remat_every():
    """The rows stay on their devices. The weight gradients are summed over the mesh after each chunk, in both loops."""
    gradient = jax.grad(partial(_loss, remat_every=2, **FULL), BY)
    for explicit in (False, True):
        _, found = over(mesh(explicit=explicit), gradient, _args(2), SPECS)
        assert found.keys() == {"all-reduce"}, found
    # Without initial_h, the rows start with zeros that no axis splits.
    _, found = over(mesh(explicit=True), jax.grad(partial(_loss, remat_every=2)), _args(1)[:3], SPECS[:3])
    assert not found, found


def check_inside_shard_map():
    check_shard_map(partial(_loss, implementation=None, **FULL), _args(2), SPECS, BY, op_by_op=True)
    # The loops of XLA start with zeros that are replicated over the devices.
    check_shard_map(partial(_loss, implementation="xla"), _args(1)[:3], SPECS[:3], (0, 1, 2))


@on_devices(
    [
        check_a_batch,
        check_plain_xla,
        check_sharded_features,
        check_transformations,
        check_groups_of_weights,
        check_inside_shard_map,
    ],
    [
        check_a_batch_before_the_steps,
        check_a_reshaped_batch,
        check_groups_of_weights_beside_rows,
        check_per_example_gradients,
        check_remat_every,
    ],
    oldest=1,
)
def test_over_a_mesh(run_python, platform, checks):
    run_checks(run_python, platform, __file__, checks)
