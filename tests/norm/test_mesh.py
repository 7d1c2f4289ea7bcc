"""Batch normalization under `jit` over a mesh and inside `shard_map`, in a fresh interpreter."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from mesh_cases import BATCH_NORM_SPECS, batch_norm_args
from mesh_running import (
    KERNEL,
    XLA_ON_GPU,
    check_reshaped_batch,
    check_shard_map,
    close,
    mesh,
    needs,
    on_devices,
    over,
    run_checks,
)

import jaxgrad

pytestmark = pytest.mark.jax_version

BY = (0, 1, 2, 3)
RELU = {"activation": "relu", "implementation": KERNEL}


def _loss(x, scale, bias, residual, **settings):
    y, mean, var = jaxgrad.batch_norm_training(x, scale, bias, residual=residual, **settings)
    return jnp.sum(jnp.sin(y)) + jnp.sum(mean**3) + jnp.sum(var**2)


def check_a_batch():
    """Statistics of the whole batch with collectives of [C] only. Any axis but the channels may be sharded."""
    training = partial(jaxgrad.batch_norm_training, implementation=KERNEL)
    for explicit in (False, True):
        (y, mean, var), found = over(
            mesh(explicit=explicit), lambda *a: training(*a[:3]), batch_norm_args(), BATCH_NORM_SPECS
        )
        assert set(found) == {"all-reduce"}, found
        assert y.sharding.spec[0] == "d"
        assert mean.sharding.is_fully_replicated
        assert var.sharding.is_fully_replicated
    gradient = jax.grad(partial(_loss, **RELU), BY)
    for spec in (P("d"), P(None, None, "d")):
        (dx, dscale, *_), found = over(mesh(), gradient, batch_norm_args(), (spec, P(), P(), spec))
        assert set(found) == {"all-reduce"}, found
        assert dx.sharding.spec == spec
        assert dscale.sharding.is_fully_replicated
    over(
        mesh(),
        lambda *args: jax.grad(lambda *args: _loss(*args, **RELU) ** 2, (0, 1))(*args),
        batch_norm_args(),
        BATCH_NORM_SPECS,
    )


def check_a_reshaped_batch():
    def loss(x, scale, bias):
        y, *_ = jaxgrad.batch_norm_training(x, scale, bias, **RELU)
        y = jaxgrad.batch_norm_inference(y, scale, bias, bias, scale**2, implementation=XLA_ON_GPU)
        return jnp.sum(jnp.sin(y) ** 2)

    x, scale, bias, _ = batch_norm_args()
    check_reshaped_batch(loss, (x, scale, bias))


def check_on_xla():
    """One all-reduce of [C] in each pass. JAX's default partitioning would gather the sample of x."""
    gradient = jax.grad(partial(_loss, activation="relu", implementation="xla"), BY)
    for spec in (P("d"), P(None, None, "d")):
        _, found = over(mesh(), gradient, batch_norm_args(), (spec, P(), P(), spec))
        assert found == {"all-reduce": 2}, found


@needs(devices=4)
def check_two_axes():
    spec = P("d", None, None, "c")
    over(mesh(c=2), jax.grad(partial(_loss, **RELU), BY), batch_norm_args(), (spec, P("c"), P(), spec))


def check_digits():
    """A mean far from zero: the combined mean and variance keep their digits."""
    x = np.random.default_rng(0).normal(size=(64, 50, 3)) * 0.1 + 3000 + np.arange(64)[:, None, None] * 0.01
    x = x.astype(np.float32)
    wide = x.astype(np.float64)
    deviation = wide - wide.mean((0, 1))
    expected = deviation / np.sqrt((deviation**2).mean((0, 1)) + 1e-5)
    one = jnp.ones(3)
    call = jax.jit(partial(jaxgrad.batch_norm_training, implementation=KERNEL))
    y, mean, var = call(jax.device_put(x, NamedSharding(mesh(), P("d"))), one, 0 * one)
    np.testing.assert_allclose(y, expected, atol=5e-6 * np.abs(expected).max())
    np.testing.assert_allclose(mean, wide.mean((0, 1)), rtol=1e-7)
    np.testing.assert_allclose(var, (deviation**2).mean((0, 1)), rtol=2e-6)


def check_a_variance_larger_than_float32():
    """It is infinite, and not the NaN of inf - inf, where the means of the devices differ by so much."""
    x = np.random.default_rng(0).normal(size=(64, 5, 3)).astype(np.float32)
    x[..., 1] += np.arange(64, dtype=np.float32)[:, None] * np.float32(1e34)
    one = jnp.ones(3)
    for implementation in {XLA_ON_GPU, "xla"}:
        call = jax.jit(partial(jaxgrad.batch_norm_training, implementation=implementation))
        y, _, var = call(jax.device_put(x, NamedSharding(mesh(), P("d"))), one, one)
        assert np.isposinf(var[1])
        assert np.isfinite(y).all()


def check_frozen_statistics():
    def loss(x, scale, bias, mean, var):
        return jnp.sum(jnp.sin(jaxgrad.batch_norm_inference(x, scale, bias, mean, var, implementation=XLA_ON_GPU)))

    x, scale, bias, _ = batch_norm_args()
    args, specs = (x, scale, bias, bias, scale**2), (P("d"), *[P()] * 4)
    _, found = over(mesh(), jax.grad(loss, (0, 1, 2, 3, 4)), args, specs)
    assert found == {"all-reduce": 1}, found
    check_shard_map(loss, args, specs, (0, 1, 2, 3, 4))


def check_vmap_over_explicit_axes():
    x, scale, bias, *_ = batch_norm_args()
    arrays = [jnp.stack([array] * 8) for array in (x, scale, bias)]

    def loss(*args):
        return jnp.sum(jnp.sin(jaxgrad.batch_norm_training(*args, implementation=KERNEL)[0]))

    _, found = over(mesh(explicit=True), jax.vmap(jax.grad(loss, (0, 1, 2))), arrays, (P("d"),) * 3)
    assert not found, found


def check_inside_shard_map():
    """Without `axis_name` each device normalizes its own shard, as the reference does."""

    def parts(x, scale, bias, residual, implementation=None):
        x, residual = (a.reshape(-1, 2, *a.shape[1:]) for a in (x, residual))
        return sum(
            _loss(x[i], scale, bias, residual[i], activation="relu", implementation=implementation)
            for i in range(len(x))
        )

    check_shard_map(parts, batch_norm_args(), BATCH_NORM_SPECS, BY, op_by_op=True)


def check_a_named_axis():
    """Statistics of the whole batch inside `shard_map`, with and without `check_vma`, and their gradients."""
    args, loss = batch_norm_args(), partial(_loss, **RELU)
    expected = jax.jit(jax.grad(loss, BY))(*args)
    second = jax.jit(jax.grad(lambda *a: jnp.sum(jax.grad(loss)(*a) ** 2), BY))(*args)

    def part(x, scale, bias, residual):
        y, mean, var = jaxgrad.batch_norm_training(x, scale, bias, residual=residual, axis_name="d", **RELU)
        return jax.lax.psum(jnp.sum(jnp.sin(y)), "d"), jnp.sum(mean**3) + jnp.sum(var**2)

    for check_vma in (True, False):
        sharded = jax.shard_map(part, mesh=mesh(), in_specs=BATCH_NORM_SPECS, out_specs=(P(), P()), check_vma=check_vma)
        close(jax.jit(jax.grad(lambda *a, f=sharded: sum(f(*a)), BY))(*args), expected)
        penalty = jax.grad(lambda *a, f=sharded: jnp.sum(jax.grad(lambda *a: sum(f(*a)))(*a) ** 2), BY)
        close(jax.jit(penalty)(*args), second, 1e-4)


def check_a_named_vmap_inside_shard_map():
    """Each device maps over its examples; the statistics are those of all examples of all devices."""
    args, loss = batch_norm_args(), partial(_loss, **RELU)
    expected = jax.jit(jax.grad(loss, BY))(*args)

    def one(x, scale, bias, residual):
        return jaxgrad.batch_norm_training(x, scale, bias, residual=residual, axis_name=("batch", "d"), **RELU)

    def part(*args):
        y, mean, var = jax.vmap(one, (0, None, None, 0), (0, None, None), axis_name="batch")(*args)
        return jax.lax.psum(jnp.sum(jnp.sin(y)), "d"), jnp.sum(mean**3) + jnp.sum(var**2)

    for check_vma in (True, False):
        sharded = jax.shard_map(part, mesh=mesh(), in_specs=BATCH_NORM_SPECS, out_specs=(P(), P()), check_vma=check_vma)
        close(jax.jit(jax.grad(lambda *a, f=sharded: sum(f(*a)), BY))(*args), expected)


def check_groups():
    """Groups of every other device; two devices form one group."""
    x, scale, bias, _ = batch_norm_args()
    devices = mesh().size
    groups = np.arange(devices).reshape(-1, min(2, devices // 2)).T.tolist()
    rows = np.arange(16).reshape(devices, -1)
    names = {"axis_name": "d", "axis_index_groups": groups}

    def gradients(x, scale, bias, **names):
        def loss(x):
            y, mean, var = jaxgrad.batch_norm_training(x, scale, bias, implementation=KERNEL, **names)
            return jnp.sum(jnp.sin(y)) + jnp.sum(mean**3 + var**2) / (len(groups[0]) if names else 1)

        return jax.grad(loss)(x)

    sharded = jax.shard_map(
        partial(gradients, **names), mesh=mesh(), in_specs=BATCH_NORM_SPECS[:3], out_specs=P("d"), check_vma=False
    )
    found = jax.jit(sharded)(x, scale, bias)
    for group in groups:
        mine = rows[group].ravel()
        close(found[mine], gradients(x[mine], scale, bias))
    mapped = jax.pmap(partial(gradients, **names), axis_name="d", in_axes=(0, None, None))
    close(mapped(x.reshape(devices, -1, *x.shape[1:]), scale, bias).reshape(x.shape), found)


@on_devices(
    [
        check_a_batch,
        check_on_xla,
        check_two_axes,
        check_vmap_over_explicit_axes,
        check_inside_shard_map,
        check_a_named_axis,
        check_groups,
    ],
    [
        check_a_reshaped_batch,
        check_digits,
        check_a_variance_larger_than_float32,
        check_frozen_statistics,
        check_a_named_vmap_inside_shard_map,
    ],
    oldest=1,
)
def test_over_a_mesh(run_python, platform, checks):
    run_checks(run_python, platform, __file__, checks)
