"""Convolutions under `jit` over a mesh and inside `shard_map`, on eight CPU devices in an interpreter of their own."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P
from mesh_running import EIGHT_DEVICES, check_shard_map, close, mesh, over

import jaxgrad
from jaxgrad import _conv_triangle
from jaxgrad._conv_geometry import Geometry
from jaxgrad._dispatch import XLA
from jaxgrad._partitioning import vary_alike

NHWC = ("NHWC", "HWIO", "NHWC")
BATCH = (P("d"), P(), P())
BY = (0, 1, 2)


def _network(x, ws, bias, *, groups=1, implementation="cpu"):
    """Two convolutions, one with relu and one with stride, and a transposed one."""
    conv = partial(jaxgrad.conv_general_dilated, dimension_numbers=NHWC, implementation=implementation)
    y = conv(x, ws[0], (1, 1), "SAME", bias=bias, activation="relu")
    y = jnp.tanh(conv(y, ws[1], (2, 2), "SAME", feature_group_count=groups))
    return jaxgrad.conv_transpose(y, ws[2], (2, 2), "SAME", implementation=implementation)


def _loss(*args, **settings):
    return jnp.sum(jnp.sin(_network(*args, **settings)))


def _args(groups=1):
    keys = jax.random.split(jax.random.key(0), 5)
    shapes = (3, 3, 3, 16), (3, 3, 16 // groups, 8), (2, 2, 8, 8)
    ws = tuple(jax.random.normal(key, shape) / 4 for key, shape in zip(keys, shapes, strict=False))
    return jax.random.normal(keys[3], (16, 6, 8, 3)), ws, jax.random.normal(keys[4], (16,))


def check_a_batch():
    """Everything stays local, and one all-reduce sums the weight gradients."""
    for groups in (1, 4):
        gradient = jax.grad(partial(_loss, groups=groups), BY)
        (dx, dws, dbias), found = over(mesh(), gradient, _args(groups), BATCH)
        assert found == {"all-reduce": 1}, found
        assert dx.sharding.spec == P("d")
        assert all(g.sharding.is_fully_replicated for g in (*dws, dbias))


def check_explicit_axes():
    (dx, _, _), found = over(mesh(explicit=True), jax.grad(_loss, BY), _args(), BATCH)
    assert found == {"all-reduce": 1}, found
    assert dx.sharding.spec == P("d", None, None, None)


def check_two_axes():
    """Batch over one axis, output features over the other: each weight gradient is split as its weight is."""

    def conv(x, w, bias):
        return jaxgrad.conv_general_dilated(
            x, w, (1, 1), "SAME", dimension_numbers=NHWC, bias=bias, implementation="cpu"
        )

    def gradient(x, w, bias):
        return jax.grad(lambda *args: jnp.sum(jnp.sin(conv(*args))), BY)(x, w, bias)

    x, (w, *_), bias = _args()
    specs = P("d"), P(None, None, None, "m"), P("m")
    (dx, dw, dbias), found = over(mesh(d=4, m=2), gradient, (x, w, bias), specs)
    assert "all-gather" not in found, found
    assert (dx.sharding.spec, dw.sharding.spec, dbias.sharding.spec) == (P("d"), *specs[1:])


def check_what_cannot_stay_local():
    """Sharded rows of pixels or input features, and weights split over the batch's own axis: gathered, never wrong."""
    args = _args()
    gradient = jax.grad(_loss, BY)
    features = P(None, None, None, "d")
    for specs in (P(None, None, "d"), P(), P()), (P(), P(None, None, "d"), P()), (P(), features, P("d")):
        x, ws, bias = args
        x = jnp.concatenate([x, x[..., :1]] * 2, -1)  # eight features
        ws = (jnp.concatenate([ws[0], ws[0][:, :, :1]] * 2, 2), *ws[1:])
        over(mesh(), gradient, (x, ws, bias), specs)
    _, found = over(mesh(), gradient, args, (P("d"), features, P()))
    assert found["all-gather"] == 3, found  # the weights, once each, and no activations


def check_a_batch_that_does_not_divide():
    """Nine rows, made from an array that could be split: they would have to be padded, and are gathered instead."""
    x, ws, bias = _args()

    def gradient(x, ws, bias):
        return jax.grad(lambda x, ws, bias: _loss(x[:9], ws, bias), BY)(x, ws, bias)

    over(mesh(), gradient, (x, ws, bias), BATCH)


def check_transformations():
    args = _args()

    def penalty(*args):
        return sum(jnp.sum(g**2) for g in jax.tree.leaves(jax.grad(_loss, BY)(*args)))

    _, found = over(mesh(), jax.grad(penalty, BY), args, BATCH)
    assert set(found) == {"all-reduce"}, found
    by_example = jax.vmap(jax.grad(lambda x, ws, bias: _loss(x[None], ws, bias)), (0, None, None))
    _, found = over(mesh(), by_example, args, BATCH)
    assert not found, found
    weights_by_example = jax.vmap(jax.grad(lambda ws, x, bias: _loss(x[None], ws, bias)), (None, 0, None))
    over(mesh(), weights_by_example, (args[1], args[0], args[2]), (P(), P("d"), P()))


def check_inside_shard_map():
    check_shard_map(_loss, _args(), BATCH, BY)
    with_groups = partial(_loss, groups=4, implementation=None)  # where the CPU's branch is a kernel, the GPU's is XLA
    check_shard_map(with_groups, _args(4), BATCH, BY)


def check_xla_inside_shard_map():
    """The triangle on plain XLA, as a GPU has it: weight gradients are summed over the mesh once."""
    geometry = Geometry((0, 2, 1), (2, 1, 0), (0, 2, 1), (1,), ((1, 1),), (1,), 1, (8,), (3,))
    routes = tuple((kind, XLA) for kind in ("forward", "backward_input", "backward_filter"))
    spec = _conv_triangle.Spec(geometry, None, routes, jaxgrad.config.current())

    def loss(x, w, bias):
        return jnp.sum(jnp.sin(_conv_triangle.forward(spec, *vary_alike(x, w, bias))))

    x, (w, *_), bias = _args()
    check_shard_map(loss, (x[:, 0], w[0], bias), BATCH, BY)


def check_pmap():
    x, ws, bias = _args()
    summed = jax.pmap(
        lambda *args: jax.lax.psum(jax.grad(_loss, (1, 2))(*args), "d"), axis_name="d", in_axes=(0, None, None)
    )(x.reshape(8, 2, *x.shape[1:]), ws, bias)
    close(jax.tree.map(lambda g: g[3], summed), jax.grad(_loss, (1, 2))(x, ws, bias))


@pytest.mark.parametrize(
    "checks",
    [
        "check_a_batch check_explicit_axes check_two_axes check_what_cannot_stay_local",
        "check_a_batch_that_does_not_divide check_transformations check_inside_shard_map check_xla_inside_shard_map "
        "check_pmap",
    ],
)
def test_over_a_mesh(run_python, checks):
    run_python(f"import test_mesh_conv as t\nfor name in {checks.split()}: getattr(t, name)()", **EIGHT_DEVICES)
