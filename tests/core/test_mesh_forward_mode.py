"""Forward mode inside `shard_map` and `pmap`, on eight CPU devices or on GPUs, in a fresh interpreter."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import pytest
from batch_norm_references import plain_training
from jax import lax
from jax.sharding import PartitionSpec as P
from mesh_cases import BATCH_NORM_SPECS, NHWC, batch_norm_args
from mesh_running import CONV_KERNEL, XLA_ON_GPU, close, mesh, needs, on_devices, run_checks

import jaxgrad

pytestmark = pytest.mark.jax_version

GROUPS = ((0, 2, 4, 6), (1, 3, 5, 7))


def _directions(args):
    keys = jax.random.split(jax.random.key(9), len(jax.tree.leaves(args)))
    drawn = [jax.random.normal(key, a.shape) for key, a in zip(keys, jax.tree.leaves(args), strict=True)]
    return jax.tree.unflatten(jax.tree.structure(args), drawn)


def _training(x, scale, bias, residual, *, groups=None, implementation=XLA_ON_GPU):
    settings = {"axis_name": "d", "axis_index_groups": groups, "activation": "relu", "implementation": implementation}
    return jaxgrad.batch_norm_training(x, scale, bias, residual=residual, **settings)


def _reference(x, scale, bias, residual, *, groups=None):
    """The textbook formula with statistics over the devices."""

    def over(array):
        return lax.pmean(array, "d", axis_index_groups=groups)

    mean = over(jnp.mean(x, (0, 1, 2)))
    var = over(jnp.mean((x - mean) ** 2, (0, 1, 2)))
    y = (x - mean) / jnp.sqrt(var + 1e-5) * scale + bias + residual
    return jax.nn.relu(y), mean, var


def _sharded(part, out_specs, check_vma, in_specs=BATCH_NORM_SPECS):
    return jax.shard_map(part, mesh=mesh(), in_specs=in_specs, out_specs=out_specs, check_vma=check_vma)


def _loss(op, check_vma):
    def part(*args):
        y, mean, var = op(*args)
        return lax.psum(jnp.sum(jnp.sin(y)), "d") + jnp.sum(mean**3) + jnp.sum(var**2)

    return _sharded(part, P(), check_vma)


def _inside(op, check_vma, args, to):
    """`linearize` and a Hessian-vector product on the shard of each device."""
    everywhere = (P("d"), P(), P())

    def loss(*args):
        return jnp.sum(jnp.sin(op(*args)[0]))

    def part(args, to):
        gradient = jax.grad(loss, (0, 3))
        return jax.linearize(op, *args)[1](*to), jax.jvp(gradient, args, to)[1]

    return _sharded(part, (everywhere, (P("d"), P("d"))), check_vma, (BATCH_NORM_SPECS, BATCH_NORM_SPECS))(args, to)


# name: function(op, check_vma, arrays, tangents)
TRANSFORMATIONS = {
    "jacfwd": lambda op, vma, at, to: jax.jacfwd(lambda s: _sharded(op, (P("d"), P(), P()), vma)(at[0], s, *at[2:]))(
        at[1]
    ),
    "forward_over_reverse": lambda op, vma, at, to: jax.jvp(jax.grad(_loss(op, vma), (0, 1, 2, 3)), at, to),
    "reverse_over_forward": lambda op, vma, at, to: jax.grad(
        lambda *at: jax.jvp(_loss(op, vma), at, to)[1], (0, 1, 2, 3)
    )(*at),
    "inside": _inside,
}


def check_a_named_axis():
    """With and without `check_vma`, against plain JAX with the same sums under the same transformation."""
    args = batch_norm_args()
    to = _directions(args)
    without_marks = ("forward_over_reverse", "inside")
    for name, check_vma in [*((name, True) for name in TRANSFORMATIONS), *((name, False) for name in without_marks)]:
        transformation = TRANSFORMATIONS[name]
        expected = jax.jit(partial(transformation, _reference, check_vma))(args, to)
        with jaxgrad.forward_mode():
            found = jax.jit(partial(transformation, _training, check_vma))(args, to)
        close(found, expected, 1e-4)


def check_a_named_axis_is_the_whole_batch():
    """The reference runs on one device with the whole batch."""
    args = batch_norm_args()
    to = _directions(args)
    reference = partial(plain_training, feature_axis=-1, activation="relu")
    expected = jax.jit(lambda at, to: tuple(map(tuple, jax.jvp(reference, at, to))))(args, to)
    for implementation in (XLA_ON_GPU, "xla"):
        op = _sharded(partial(_training, implementation=implementation), (P("d"), P(), P()), True)
        close(jax.jit(partial(jaxgrad.jvp, op))(args, to), expected, 1e-4)


@needs(devices=8)
def check_groups():
    args = batch_norm_args()
    to = _directions(args)
    found, expected = (
        jax.jit(partial(jaxgrad.jvp, _sharded(partial(op, groups=GROUPS), (P("d"),) * 3, False)))(args, to)
        for op in (_training, _reference)
    )
    close(found, expected, 1e-4)

    def parts(arrays):
        return tuple(a.reshape(8, 2, *a.shape[1:]) if a.ndim > 1 else jnp.stack([a] * 8) for a in arrays)

    mapped = jax.pmap(lambda at, to: jaxgrad.jvp(partial(_training, groups=GROUPS), at, to), axis_name="d")
    merged = jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), mapped(parts(args), parts(to)))
    close(merged, expected, 1e-4)


def check_other_ops():
    """Ops without communication between shards: Hessian-vector products of a sum over the batch, and a tangent."""
    shapes = (3, 16, 4), (1, 6, 4), (1, 6, 2), (1, 12), (1, 16, 2)
    keys = jax.random.split(jax.random.key(3), len(shapes))
    gru_args = tuple(jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=True))
    x, scale, bias, _ = batch_norm_args()

    def loss(op):
        return lambda *args: jnp.sum(jnp.sin(op(*args)))

    def gradient(loss):
        return lambda *args: jax.grad(loss, tuple(range(len(args))))(*args)

    ops = (
        (
            gradient,
            lambda x, w: jaxgrad.conv_general_dilated(
                x, w, (2, 2), "SAME", dimension_numbers=NHWC, implementation=CONV_KERNEL
            ),
            (x, jax.random.normal(keys[0], (3, 3, 4, 5))),
            (P("d"), P()),
        ),
        (
            gradient,
            partial(jaxgrad.batch_norm_inference, implementation=XLA_ON_GPU),
            (x, scale, bias, bias, scale**2),
            (P("d"), *[P()] * 4),
        ),
        (
            lambda loss: loss,
            lambda x, w, r, b, h: jaxgrad.gru(x, w, r, b, None, h, implementation=XLA_ON_GPU)[0],
            gru_args,
            (P(None, "d"), P(), P(), P(), P(None, "d")),
        ),
    )
    for differentiated, op, args, specs in ops:
        whole, to = loss(op), _directions(args)
        sharded = _sharded(lambda *args, whole=whole: lax.psum(whole(*args), "d"), P(), True, specs)
        found, expected = (jax.jit(partial(jaxgrad.jvp, differentiated(f)))(args, to) for f in (sharded, whole))
        close(found, expected, 1e-4)


@on_devices([check_a_named_axis, check_a_named_axis_is_the_whole_batch, check_other_ops, check_groups])
def test_inside_shard_map(run_python, platform, checks):
    run_checks(run_python, platform, __file__, checks)
