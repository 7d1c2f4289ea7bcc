"""Accelerated functions over a mesh of devices, in fresh interpreters."""

from __future__ import annotations

import contextlib
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from accelerated import PASSES, passes
from jax import lax
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from mesh_cases import NHWC
from mesh_running import (
    CONV_KERNEL,
    check_reshaped_batch,
    close,
    collectives,
    mesh,
    needs,
    on_devices,
    over,
    run_checks,
)

import jaxgrad
from jaxgrad._src.choice.op import lowering_platform

pytestmark = pytest.mark.jax_version

BY = (0, 1)
BATCH = (P("d"), P())


def _network(x, ws, groups=1):
    """A convolution, a strided one, perhaps with groups, and a transposed one."""
    conv = partial(lax.conv_general_dilated, dimension_numbers=NHWC)
    y = jax.nn.relu(conv(x, ws[0], (1, 1), "SAME"))
    y = jnp.tanh(conv(y, ws[1], (2, 2), "SAME", feature_group_count=groups))
    return lax.conv_transpose(y, ws[2], (2, 2), "SAME")


def _loss(x, ws, groups=1):
    return jnp.sum(jnp.sin(_network(x, ws, groups)))


def _args(groups=1):
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = (3, 3, 8, 16), (3, 3, 16 // groups, 8), (2, 2, 8, 8)
    ws = tuple(jax.random.normal(key, shape) / 4 for key, shape in zip(keys, shapes, strict=False))
    return jax.random.normal(keys[3], (16, 6, 8, 8)), ws


def _put(mesh, args, specs):
    return tuple(
        jax.tree.map(lambda a, spec=spec: jax.device_put(a, NamedSharding(mesh, spec)), arg)
        for arg, spec in zip(args, specs, strict=True)
    )


def _accelerated(function):
    return jaxgrad.accelerate(function, implementation=CONV_KERNEL)


def _over(devices, function, args, specs, context=contextlib.nullcontext):
    """Results and collectives of the accelerated program, after comparison with the plain one on one device."""
    placed = _put(devices, args, specs)
    with context():
        compiled = jax.jit(_accelerated(function)).lower(*placed).compile()
        found = compiled(*placed)
    counts = passes(compiled)
    assert "xla" not in counts, counts
    assert counts, "no kernel"
    close(found, jax.jit(function)(*args))
    return found, collectives(compiled.as_text())


def check_a_batch():
    """Under `jit`, over axes of both kinds, with and without `jax.set_mesh`: one all-reduce of the weight gradients."""
    for groups, explicit, set_mesh in ((1, False, False), (1, False, True), (1, True, False), (4, True, True)):
        devices = mesh(explicit=explicit)
        context = partial(jax.set_mesh, devices) if set_mesh else contextlib.nullcontext
        (dx, dws), found = _over(devices, jax.grad(partial(_loss, groups=groups), BY), _args(groups), BATCH, context)
        assert found == {"all-reduce": 1}, found
        assert dx.sharding.spec[0] == "d"
        assert all(g.sharding.is_fully_replicated for g in dws)


def check_a_reshaped_batch():
    def loss(x, w):
        return jnp.sum(jnp.sin(lax.conv_general_dilated(x, w, (2, 1), "SAME", dimension_numbers=NHWC)) ** 2)

    x, (w, *_) = _args()
    check_reshaped_batch(_accelerated(loss), (x, w))


def check_batch_groups():
    """Read as a forward pass and as an input gradient: groups, and examples of a group, stay on their devices."""
    x, (w, *_) = _args()
    args = x[..., :6], w[:, :, :6, :10]

    def loss(x, w, dilation):
        conv = partial(lax.conv_general_dilated, dimension_numbers=NHWC, batch_group_count=2)
        return jnp.sum(jnp.sin(_accelerated(conv)(x, w, (1, 1), ((1, 1), (2, 1)), dilation)) ** 2)

    for dilation, pass_name in (((1, 1), "forward"), ((2, 1), "input_gradient")):
        function = partial(loss, dilation=dilation)
        assert passes(jax.jit(function).lower(*_put(mesh(), args, BATCH)).compile()) == {pass_name: 1}
        _, found = over(mesh(), function, args, BATCH)
        assert set(found) == {"all-reduce"}, found
    over(mesh(), jax.grad(partial(loss, dilation=(1, 1)), BY), args, BATCH)


def check_mark_before_and_after_grad():
    """The decorator around the loss, and around its gradient under `jit`."""
    placed = _put(mesh(), _args(), BATCH)
    expected = jax.jit(jax.grad(_loss, BY))(*_args())
    for run in (jax.jit(jax.grad(_accelerated(_loss), BY)), _accelerated(jax.jit(jax.grad(_loss, BY)))):
        compiled = run.lower(*placed).compile()
        assert set(passes(compiled)) == PASSES
        assert collectives(compiled.as_text()) == {"all-reduce": 1}
        close(run(*placed), expected)


def check_inside_shard_map():
    """The mark inside and around `shard_map`, with and without `check_vma`."""
    expected = jax.jit(jax.grad(_loss, BY))(*_args())
    shard_map = partial(jax.shard_map, mesh=mesh(), in_specs=BATCH)
    for check_vma in (True, False):

        def total(x, ws, loss):
            return lax.psum(loss(x, ws), "d")

        inside = shard_map(partial(total, loss=_accelerated(_loss)), out_specs=P(), check_vma=check_vma)
        around = _accelerated(shard_map(partial(total, loss=_loss), out_specs=P(), check_vma=check_vma))
        for sharded in (inside, around):
            lowered = jax.jit(jax.grad(sharded, BY)).lower(*_args())
            assert set(passes(lowered)) == PASSES
            close(lowered.compile()(*_args()), expected)
    local = shard_map(_accelerated(jax.grad(_loss, BY)), out_specs=BATCH)
    close(jax.jit(local)(*_args()), expected)


@needs(devices=4)
def check_partly_manual_shard_map():
    """`shard_map` over one axis of two: the other one splits the batch further."""
    devices = mesh(m=2)

    def total(x, ws):
        return lax.psum(_accelerated(_loss)(x, ws), "m")

    sharded = jax.shard_map(total, mesh=devices, in_specs=(P("m"), P()), out_specs=P(), axis_names={"m"})
    placed = _put(devices, _args(), (P(("m", "d")), P()))
    lowered = jax.jit(jax.grad(sharded, BY)).lower(*placed)
    close(lowered.compile()(*placed), jax.jit(jax.grad(_loss, BY))(*_args()))


def check_per_example_gradients():
    """They stay on the devices of the examples, other than with groups, where JAX reshapes examples and groups."""
    for groups in (1, 4):
        gradient = jax.vmap(jax.grad(lambda x, ws, groups=groups: _loss(x[None], ws, groups), BY), (0, None))
        (dx, dws), found = _over(mesh(), gradient, _args(groups), BATCH)
        if groups == 1:
            assert not found, found
            assert all(g.sharding.spec[0] == "d" for g in (dx, *dws))


@needs(devices=4)
def check_output_features():
    """Batch over one axis, output features of the first weights over the other; gradients are split alike."""

    def loss(x, w):
        return jnp.sum(jnp.sin(lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=NHWC)))

    x, (w, *_) = _args()
    specs = P("d"), P(None, None, None, "m")
    gradients, found = _over(mesh(m=2), jax.grad(loss, BY), (x, w), specs)
    assert "all-gather" not in found, found
    assert tuple(g.sharding.spec for g in gradients) == specs


def _train(step, args, specs, devices=None):
    """The losses of three steps of gradient descent, and the program of a step."""
    x, ws = args if devices is None else _put(devices, args, specs)
    run = jax.jit(step).lower(x, ws).compile()
    losses = []
    for _ in range(3):
        value, ws = run(x, ws)
        losses.append(value)
    return losses, run.as_text()


def _step(x, ws):
    value, gradients = jax.value_and_grad(lambda ws: _loss(x, ws) / 16)(ws)
    return value, jax.tree.map(lambda w, g: w - 0.1 * g, ws, gradients)


def check_training():
    """Data parallel: no activation is gathered, and the loss and all weight gradients are summed at once."""
    expected, _ = _train(_step, _args(), BATCH)
    losses, text = _train(_accelerated(_step), _args(), BATCH, mesh())
    close(losses, expected)
    assert set(passes(text)) == PASSES
    assert collectives(text) == {"all-reduce": 1}


@needs(devices=4)
def check_training_with_split_features():
    """Weights split by output features, batch split over the other axis: no activation is gathered."""

    def step(x, ws):
        def loss(ws):
            conv = partial(lax.conv_general_dilated, dimension_numbers=NHWC)
            y = jnp.tanh(conv(x, ws[0], (1, 1), "SAME"))
            return jnp.sum(jnp.sin(conv(y, ws[1], (1, 1), "SAME"))) / 16

        value, gradients = jax.value_and_grad(loss)(ws)
        return value, jax.tree.map(lambda w, g: w - 0.1 * g, ws, gradients)

    x, (first, second, _) = _args()
    devices = mesh(m=2)
    of_output, of_input = P(None, None, None, "m"), P(None, None, "m")
    first, second = (_put(devices, (w,), (spec,))[0] for w, spec in ((first, of_output), (second, of_input)))
    (x,) = _put(devices, (x,), (P("d"),))
    expected, _ = _train(step, (_args()[0], _args()[1][:2]), None)
    losses, text = _train(_accelerated(step), (x, (first, second)), None)
    close(losses, expected)
    assert set(passes(text)) == PASSES
    assert set(collectives(text)) == {"all-reduce"}, collectives(text)


def check_gspmd_keeps_the_lowering_of_jax():
    """Over several devices; on one device nothing is partitioned."""
    placed = _put(mesh(), _args(), BATCH)
    expected = jax.jit(jax.grad(_loss, BY))(*_args())
    jax.config.update("jax_use_shardy_partitioner", False)
    try:
        gradient = jax.jit(jax.grad(_accelerated(_loss), BY))
        assert passes(gradient.lower(*placed)) == passes(jax.jit(jax.grad(_loss, BY)).lower(*placed))
        assert set(passes(gradient.lower(*_args()))) == PASSES
        close(gradient(*placed), expected)
    finally:
        jax.config.update("jax_use_shardy_partitioner", True)


def check_pmap():
    x, ws = _args()
    gradient = jax.grad(_accelerated(_loss), 1)
    summed = jax.pmap(lambda x, ws: lax.psum(gradient(x, ws), "d"), axis_name="d", in_axes=(0, None))
    found = summed(x.reshape(mesh().size, -1, *x.shape[1:]), ws)
    close(jax.tree.map(lambda g: g[1], found), jax.jit(jax.grad(_loss, 1))(x, ws))


@needs(devices=4)
def check_two_meshes():
    """JAX refuses a marked program whose shardings name two meshes, as it refuses the ops."""
    first, second = mesh(), mesh(m=2)
    x, (w, *_) = _args()

    def convolve(x, w):
        return lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=NHWC)

    def run(function):
        shardings = (NamedSharding(first, P("d")), NamedSharding(first, P())), NamedSharding(second, P("m"))
        return jax.jit(function, in_shardings=shardings[0], out_shardings=shardings[1])(x, w)

    run(convolve)
    with pytest.raises(ValueError, match="mesh should be the same across the entire program"):
        run(_accelerated(convolve))


def check_abstract_mesh():
    """Without a mark nothing changes. Over automatic axes, JAX partitions the kernels only where devices are known."""
    platforms = (lowering_platform(jax.default_backend()),)
    for kind in (AxisType.Auto, AxisType.Explicit):
        devices = AbstractMesh((8,), ("d",), axis_types=(kind,))

        def shaped(array, spec, devices=devices):
            return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=NamedSharding(devices, spec))

        x, ws = _args()
        shapes = shaped(x, P("d")), jax.tree.map(lambda w: shaped(w, P()), ws)

        def lowered(function, shapes=shapes):
            return passes(jax.jit(function).trace(*shapes).lower(lowering_platforms=platforms))

        assert set(lowered(_loss)) == {"xla"}
        assert set(lowered(_off)) == {"xla"}
        sharded = partial(jax.shard_map, mesh=devices, in_specs=BATCH, out_specs=P("d"))
        assert "xla" not in lowered(sharded(_accelerated(_network)))
        if kind == AxisType.Explicit:
            assert "xla" not in lowered(_accelerated(_loss))
        else:
            with pytest.raises(ValueError, match="require devices to be present during lowering"):
                lowered(_accelerated(_loss))


def check_shardings_that_jax_refuses():
    """Over explicit axes, a pass may reshape or pad an axis that is split: such an equation stays as JAX writes it."""

    def grouped(w, x):  # groups of the weight gradient are reshaped from the batch
        return jnp.sum(lax.conv_general_dilated(x, w, (1, 1), "SAME", None, None, NHWC, 2) ** 2)

    def padded(w, x):  # XLA on a CPU miscompiles it as it is
        return jnp.sum(lax.conv_general_dilated(x, w, (2,), ((1, 0),), None, None, ("NWC", "WIO", "NWC")) ** 2)

    devices = mesh(explicit=True)
    for loss, x_shape, w_shape in ((grouped, (2, 2, 4), (3, 3, 2, 6)), (padded, (3, 2), (3, 2, 3))):
        w, x = (jax.random.normal(jax.random.key(0), shape) for shape in (w_shape, (devices.size, *x_shape)))
        gradient, placed = jax.jit(jax.grad(loss)), _put(devices, (w, x), (P(), P("d")))
        close(jaxgrad.accelerate(gradient)(*placed), gradient(w, x))
        if loss is grouped and jax.default_backend() == "cpu":
            reasons = [row.reason for row in jaxgrad.report(jaxgrad.accelerate(jax.grad(loss)), *placed).convolutions]
            assert any("JAX refuses to compute the pass" in reason for reason in reasons), reasons


_off = jaxgrad.accelerate(_loss, implementation="xla")


@on_devices(
    [
        check_a_batch,
        check_a_reshaped_batch,
        check_batch_groups,
        check_inside_shard_map,
        check_partly_manual_shard_map,
    ],
    [
        check_mark_before_and_after_grad,
        check_per_example_gradients,
        check_output_features,
        check_training,
        check_training_with_split_features,
        check_gspmd_keeps_the_lowering_of_jax,
        check_abstract_mesh,
        check_shardings_that_jax_refuses,
        check_pmap,
        check_two_meshes,
    ],
)
def test_over_a_mesh(run_python, platform, checks):
    run_checks(run_python, platform, __file__, checks)
