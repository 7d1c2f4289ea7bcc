"""Max pooling under `jit` over a mesh and inside `shard_map`, in a fresh interpreter."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from mesh_running import XLA_ON_GPU, check_reshaped_batch, check_shard_map, mesh, needs, on_devices, over, run_checks

import jaxgrad

pytestmark = pytest.mark.jax_version


def _x(*shape):
    return jax.random.normal(jax.random.key(0), shape)


def _loss(x, **settings):
    settings = {"padding": "SAME", "implementation": XLA_ON_GPU, **settings}
    return jnp.sum(jnp.sin(jaxgrad.max_pool(x, (3, 2), (2, 1), **settings)))


def check_a_batch():
    """A split batch or split channels stay split, without collectives."""
    for explicit in (False, True):
        for spec in (P("d"), P(None, None, None, "d")):
            devices = mesh(explicit=explicit)
            dx, found = over(devices, jax.grad(_loss), (_x(16, 6, 5, 8),), (spec,))
            assert not found, found
            assert dx.sharding.is_equivalent_to(NamedSharding(devices, spec), dx.ndim)
    channels_first = partial(_loss, feature_axis=1)
    for spec in (P("d"), P(None, "d")):
        _, found = over(mesh(), jax.grad(channels_first), (_x(16, 8, 6, 5),), (spec,))
        assert not found, found


def check_average():
    """The gradient of an average needs no x."""

    def loss(x, implementation=XLA_ON_GPU):
        y = jaxgrad.avg_pool(x, (3, 2), (2, 1), "SAME", False, implementation=implementation)
        return jnp.sum(jnp.sin(y))

    for explicit in (False, True):
        for spec in (P("d"), P(None, None, None, "d")):
            devices = mesh(explicit=explicit)
            dx, found = over(devices, jax.grad(loss), (_x(16, 6, 5, 8),), (spec,))
            assert not found, found
            assert dx.sharding.is_equivalent_to(NamedSharding(devices, spec), dx.ndim)
    for implementation in (XLA_ON_GPU, "xla"):
        check_shard_map(partial(loss, implementation=implementation), (_x(16, 6, 5, 3),), (P("d"),), (0,))


def check_a_split_image():
    """A split spatial axis is gathered."""
    over(mesh(), jax.grad(_loss), (_x(2, 16, 5, 3),), (P(None, "d"),))


@needs(devices=4)
def check_two_axes():
    dx, found = over(mesh(c=2), jax.grad(_loss), (_x(8, 6, 5, 4),), (P("d", None, None, "c"),))
    assert not found, found
    assert dx.sharding.spec == P("d", None, None, "c")


def check_a_reshaped_batch():
    check_reshaped_batch(_loss, (_x(16, 6, 5, 3),))


def check_inside_shard_map():
    check_shard_map(_loss, (_x(16, 6, 5, 3),), (P("d"),), (0,), op_by_op=True)


def check_dilated_windows():
    """JAX has no gradient of them."""
    for implementation in (None, "xla"):
        loss = partial(_loss, window_dilation=(1, 2), implementation=implementation)
        check_shard_map(loss, (_x(16, 6, 5, 3),), (P("d"),), (0,))
        for explicit in (False, True):
            over(mesh(explicit=explicit), jax.grad(loss), (_x(16, 6, 5, 8),), (P("d"),))


def check_forward_mode():
    x = _x(16, 6, 5, 3)

    def slope(x, t):
        with jaxgrad.forward_mode():
            return jax.jvp(partial(_loss), (x,), (t,))[1]

    over(mesh(), slope, (x, jnp.cos(x)), (P("d"), P("d")))


@on_devices(
    [check_a_batch, check_two_axes, check_inside_shard_map, check_forward_mode],
    [check_a_split_image, check_a_reshaped_batch, check_average, check_dilated_windows],
    oldest=1,
)
def test_over_a_mesh(run_python, platform, checks):
    run_checks(run_python, platform, __file__, checks)
