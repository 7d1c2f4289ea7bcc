"""Convolutions under `jit` over a mesh and inside `shard_map`, in fresh interpreters."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P
from mesh_cases import NHWC
from mesh_running import (
    CONV_KERNEL,
    OWN_KERNEL,
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
from jaxgrad._src.choice.candidates import XLA
from jaxgrad._src.conv import autodiff, jvp
from jaxgrad._src.conv.call.geometry import ConvGeometry
from jaxgrad._src.conv.call.params import ConvParams
from jaxgrad._src.run import forward_mode
from jaxgrad._src.run.mesh_axes import pvary_to_match

pytestmark = pytest.mark.jax_version

BATCH = (P("d"), P(), P())
BY = (0, 1, 2)


def _network(x, ws, bias, *, groups=1, implementation=CONV_KERNEL):
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
    """One all-reduce of the weight gradients is the only collective."""
    for groups in (1, 4):
        gradient = jax.grad(partial(_loss, groups=groups), BY)
        (dx, dws, dbias), found = over(mesh(), gradient, _args(groups), BATCH)
        assert found == {"all-reduce": 1}, found
        assert dx.sharding.spec == P("d")
        assert all(g.sharding.is_fully_replicated for g in (*dws, dbias))


def check_depthwise_kernels():
    """jaxgrad's own kernels of all passes: the batch or the examples of `vmap` are split. Channels are gathered."""

    def loss(x, w, bias):
        conv = partial(jaxgrad.conv_general_dilated, dimension_numbers=NHWC, implementation=OWN_KERNEL)
        return jnp.sum(jnp.sin(conv(x, w, (1, 1), "SAME", feature_group_count=w.shape[3], bias=bias)))

    keys = jax.random.split(jax.random.key(0), 3)
    shapes = (16, 6, 8, 32), (3, 5, 1, 32), (32,)
    args = tuple(jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=True))
    gradient = jax.grad(loss, BY)
    text = jax.jit(gradient).lower(*args).as_text()
    for name in ("forward", "input_gradient", "weight_gradient"):
        assert f"@jaxgrad_{OWN_KERNEL}_depthwise_{name}" in text, name
    _, found = over(mesh(), gradient, args, BATCH)
    assert found == {"all-reduce": 1}, found
    channels = P(None, None, None, "d")
    over(mesh(), gradient, args, (channels, channels, P("d")))
    of_one = jax.grad(lambda x, w, bias: loss(x[None], w, bias), BY)
    _, found = over(mesh(), jax.vmap(of_one, (0, None, None)), args, BATCH)
    assert not found, found
    check_shard_map(loss, args, BATCH, BY)


def check_arrays_on_no_mesh():
    """Under `jax.set_mesh`, the program of arrays that no mesh holds runs on one device."""
    x, (w, *_), bias = _args()
    gradient = jax.jit(jax.grad(_loss_of_one, BY))
    expected = gradient(x, w, bias)
    with jax.set_mesh(mesh()):
        close(gradient(x, w, bias), expected)


def _loss_of_one(x, w, bias):
    y = jaxgrad.conv_general_dilated(
        x, w, (1, 1), "SAME", dimension_numbers=NHWC, bias=bias, implementation=CONV_KERNEL
    )
    return jnp.sum(jnp.sin(y))


def check_explicit_axes():
    (dx, _, _), found = over(mesh(explicit=True), jax.grad(_loss, BY), _args(), BATCH)
    assert found == {"all-reduce": 1}, found
    assert dx.sharding.spec == P("d", None, None, None)


def check_vmap_over_explicit_axes():
    """Of examples, and of networks of which each has its own weights."""
    x, (w, *_), bias = _args()
    xs, ws = jnp.stack([x] * 8), jnp.stack([w] * 8)
    for axes, weights, spec in ((0, None, None), w, P()), ((0, 0, None), ws, P("d")):
        gradients = jax.vmap(jax.grad(_loss_of_one, (0, 1)), axes)
        found, collectives = over(mesh(explicit=True), gradients, (xs, weights, bias), (P("d"), spec, P()))
        assert not collectives, collectives
        assert all(gradient.sharding.spec[0] == "d" for gradient in found)


def _check_output_features(devices, x_spec, axis):
    """Each weight gradient has the sharding of its weights."""

    def loss(x, w, bias):
        conv = partial(jaxgrad.conv_general_dilated, dimension_numbers=NHWC, implementation=CONV_KERNEL)
        return jnp.sum(jnp.sin(conv(x, w, (1, 1), "SAME", bias=bias)))

    x, (w, *_), bias = _args()
    specs = x_spec, P(None, None, None, axis), P(axis)
    gradients, found = over(devices, jax.grad(loss, BY), (x, w, bias), specs)
    assert "all-gather" not in found, found
    assert tuple(g.sharding.spec for g in gradients) == specs


def check_output_features():
    _check_output_features(mesh(), P(), "d")


@needs(devices=4)
def check_two_axes():
    """Batch over one axis, output features over the other."""
    _check_output_features(mesh(m=2), P("d"), "m")


@needs(devices=4)
def check_input_features():
    """Each device convolves its own features, and an all-reduce sums the results."""
    conv = partial(
        jaxgrad.conv_general_dilated,
        window_strides=(2, 1),
        padding="SAME",
        dimension_numbers=NHWC,
        implementation=CONV_KERNEL,
    )

    def gradient(*args):
        def loss(x, first, second, bias):
            return jnp.sum(jnp.sin(conv(jnp.tanh(conv(x, first)), second, bias=bias)))

        return jax.grad(loss, (0, 1, 2, 3))(*args)

    x, (first, second, _), _ = _args()
    bias = jnp.arange(8.0)
    of_output, of_input = P(None, None, None, "m"), P(None, None, "m")
    (dx, dfirst, dsecond, _), found = over(
        mesh(m=2), gradient, (x, first, second, bias), (P("d"), of_output, of_input, P())
    )
    assert set(found) == {"all-reduce"}, found
    assert [g.sharding.spec[axis] for g, axis in ((dx, 0), (dfirst, 3), (dsecond, 2))] == ["d", "m", "m"]
    stack = jnp.arange(1.0, 4)
    arrays = jnp.multiply.outer(stack, jnp.tanh(x[..., :1] * jnp.arange(16.0))), jnp.multiply.outer(stack, second)
    mapped = jax.vmap(partial(conv, bias=bias))
    _, found = over(mesh(), mapped, arrays, (P(*[None] * 4, "d"), P(*[None] * 3, "d")))
    assert found == {"all-reduce": 1}, found


def check_sharding_that_needs_all_gather():
    """Sharded spatial axes, and weights sharded over the axis of the batch: gathered, with correct results."""
    args = _args()
    gradient = jax.grad(_loss, BY)
    features = P(None, None, None, "d")
    for specs in (P(None, None, "d"), P(), P()), (P(), P(None, None, "d"), P()), (P(), features, P("d")):
        x, ws, bias = args
        x = jnp.concatenate([x, x[..., :1]] * 2, -1)  # eight features
        ws = (jnp.concatenate([ws[0], ws[0][:, :, :1]] * 2, 2), *ws[1:])
        over(mesh(), gradient, (x, ws, bias), specs)
    _, found = over(mesh(), gradient, args, (P("d"), features, P()))
    assert found["all-gather"] == 3, found  # the weights, and no activations


def check_a_reshaped_batch():
    def loss(x, w):
        y = jaxgrad.conv_general_dilated(x, w, (2, 1), "SAME", dimension_numbers=NHWC, implementation=CONV_KERNEL)
        y = jaxgrad.conv_transpose(y, w.swapaxes(2, 3), (1, 2), "SAME", implementation=CONV_KERNEL)
        return jnp.sum(jnp.sin(y) ** 2)

    x, (w, *_), _ = _args()
    check_reshaped_batch(loss, (x, w))


def check_halves_of_a_batch():
    """Mapped by `vmap`, and merged in another order."""

    def loss(x, w, bias):
        halves = x.reshape(2, -1, *x.shape[1:])
        mapped = sum(jnp.sum(jax.vmap(_loss_of_one, (axis, None, None))(halves, w, bias)) for axis in (0, 1))
        return mapped + _loss_of_one(halves.swapaxes(0, 1).reshape(x.shape), w, bias)

    x, (w, *_), bias = _args()
    over(mesh(), jax.grad(loss, BY), (x, w, bias), BATCH)


def check_a_batch_that_does_not_divide():
    """A batch of nine, made from a sharded array, is gathered instead of padded."""
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
    mapped = jax.vmap(jax.grad(lambda x, ws, bias: _loss(x[None], ws, bias)), (0, None, None))
    _, found = over(mesh(), mapped, args, BATCH)
    assert not found, found


def check_per_example_gradients():
    """With shared weights, groups, and weights for each problem: no collectives."""
    for groups, (x, ws, bias) in ((1, _args()), (4, _args(4))):
        own = jax.tree.map(lambda w: w * jnp.arange(1.0, 17).reshape(16, *[1] * w.ndim), (ws, bias))
        loss = partial(_loss, groups=groups)
        gradient = jax.grad(lambda x, ws, bias, loss=loss: loss(x[None], ws, bias), BY)
        (dx, dws, dbias), found = over(mesh(), jax.vmap(gradient, (0, None, None)), (x, ws, bias), BATCH)
        assert not found, found
        assert all(g.sharding.spec[0] == "d" for g in (dx, *dws, dbias))
        _, found = over(mesh(), jax.vmap(gradient), (x, *own), (P("d"),) * 3)
        assert not found, found


def _products(z, w_up, w_down):
    """A transposed convolution of one position to 4 x 6, and a window that covers them: matrix products."""
    y = jnp.tanh(jaxgrad.conv_transpose(z, w_up, (1, 1), "VALID"))
    y = jaxgrad.conv_general_dilated(y, w_down, (1, 1), "VALID", dimension_numbers=NHWC)
    return jnp.sum(jnp.sin(y))


def _check_products(loss, shapes):
    """Matrix products of split images and weights: only weight gradients are summed, and those of examples are not."""
    args = _check_batch_of_products(loss, shapes)
    _, found = over(mesh(explicit=True), jax.grad(loss, BY), args, BATCH)
    assert found == {"all-reduce": 1}, found
    of_one = jax.grad(lambda x, *ws: loss(x[None], *ws), BY)
    gradients, found = over(mesh(), jax.vmap(of_one, (0, None, None)), args, BATCH)
    assert not found, found
    assert all(g.sharding.spec[0] == "d" for g in gradients)
    check_shard_map(loss, args, BATCH, BY)


def _check_batch_of_products(loss, shapes):
    """Returns the arguments of the loss."""
    keys = jax.random.split(jax.random.key(1), len(shapes))
    args = tuple(jax.random.normal(key, shape) / 3 for key, shape in zip(keys, shapes, strict=True))
    (dx, *dws), found = over(mesh(), jax.grad(loss, BY), args, BATCH)
    assert found == {"all-reduce": 1}, found
    assert dx.sharding.spec[0] == "d"
    assert all(g.sharding.is_fully_replicated for g in dws)
    return args


def check_matrix_products():
    _check_products(_products, ((16, 1, 1, 8), (4, 6, 8, 5), (4, 6, 5, 3)))


def _patches(x, w_down, w_up):
    """Windows that do not overlap, with groups, and a transposed convolution, on XLA: matrix products of patches."""
    settings = {"padding": "VALID", "implementation": "xla"}
    y = jaxgrad.conv_general_dilated(x, w_down, (3, 4), dimension_numbers=NHWC, feature_group_count=3, **settings)
    return jnp.sum(jnp.sin(jaxgrad.conv_transpose(jnp.tanh(y), w_up, (2, 3), **settings)))


def check_windows_that_do_not_overlap():
    """With groups of few features, and with as many as a tensor core takes."""
    _check_products(_patches, ((16, 6, 8, 3), (3, 4, 1, 6), (2, 3, 6, 5)))
    _check_batch_of_products(_patches, ((16, 6, 8, 24), (3, 4, 8, 9), (2, 3, 9, 8)))


def check_inside_shard_map():
    check_shard_map(_loss, _args(), BATCH, BY, op_by_op=True)
    with_groups = partial(_loss, groups=4, implementation=None)  # a kernel on the CPU, XLA on a GPU
    check_shard_map(with_groups, _args(4), BATCH, BY)


def check_xla_inside_shard_map():
    """The three passes on XLA, as on a GPU: weight gradients are summed over the mesh once."""
    x, (w, *_), bias = _args()
    check_shard_map(_loss_on_xla, (x[:, 0], w[0], bias), BATCH, BY)


def check_groups_on_xla():
    """Convolutions with groups, whose operands the default partitioning of JAX gathers."""
    x, (_, w, _), bias = _args(groups=4)
    x = jnp.tile(x[:, 0], (1, 1, 6))[..., :16]
    _, found = over(mesh(), jax.grad(partial(_loss_on_xla, groups=4), BY), (x, w[0], bias[:8]), BATCH)
    assert found == {"all-reduce": 1}, found


def check_independent_problems_on_xla():
    """Independent problems with their own weights, which XLA runs as groups."""
    x, (w, *_), bias = _args()
    own = (w[0] * jnp.arange(1.0, 17).reshape(16, 1, 1, 1), bias * jnp.arange(1.0, 17)[:, None])
    gradient = jax.vmap(jax.grad(lambda x, w, bias: _loss_on_xla(x[None], w, bias), BY))
    _, found = over(mesh(), gradient, (x[:, 0], *own), (P("d"),) * 3)
    assert not found, found


def _loss_on_xla(x, w, bias, groups=1):
    """A loss of the three passes on XLA, with one spatial axis of eight."""
    geometry = ConvGeometry((0, 2, 1), (2, 1, 0), (0, 2, 1), (1,), ((1, 1),), (1,), groups, (8,), (3,))
    candidates = tuple((name, XLA) for name in ("forward", "input_gradient", "weight_gradient"))
    params = ConvParams(geometry, None, candidates, jaxgrad.config.current())
    y = forward_mode.call(autodiff.forward, jvp.FORWARD, params, *pvary_to_match(x, w, bias))
    return jnp.sum(jnp.sin(y))


def check_pmap():
    x, ws, bias = _args()
    summed = jax.pmap(
        lambda *args: jax.lax.psum(jax.grad(_loss, (1, 2))(*args), "d"), axis_name="d", in_axes=(0, None, None)
    )(x.reshape(mesh().size, -1, *x.shape[1:]), ws, bias)
    close(jax.tree.map(lambda g: g[1], summed), jax.grad(_loss, (1, 2))(x, ws, bias))


@on_devices(
    [
        check_a_batch,
        check_arrays_on_no_mesh,
        check_explicit_axes,
        check_vmap_over_explicit_axes,
        check_two_axes,
        check_sharding_that_needs_all_gather,
        check_per_example_gradients,
        check_inside_shard_map,
        check_pmap,
    ],
    [
        check_depthwise_kernels,
        check_output_features,
        check_input_features,
        check_a_reshaped_batch,
        check_halves_of_a_batch,
        check_a_batch_that_does_not_divide,
        check_transformations,
        check_xla_inside_shard_map,
        check_groups_on_xla,
        check_independent_problems_on_xla,
        check_matrix_products,
        check_windows_that_do_not_overlap,
    ],
    oldest=1,
)
def test_over_a_mesh(run_python, platform, checks):
    run_checks(run_python, platform, __file__, checks)
