"""The argument `out_sharding`, against `jax.lax.conv_general_dilated`, in fresh interpreters with several devices."""

from __future__ import annotations

import itertools
from contextlib import nullcontext
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from mesh_cases import NHWC
from mesh_running import CONV_KERNEL, close, collectives, mesh, needs, on_devices, run_checks

import jaxgrad

pytestmark = pytest.mark.jax_version

BATCH, SPACE = P("d"), P(None, "d")
INPUT, OUTPUT = P(None, None, "m"), P(None, None, None, "m")  # features of w; OUTPUT also of the result


def _arrays(groups=1):
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = (16, 8, 6, 4), (3, 2, 4 // groups, 8), (8,)
    return [jax.random.normal(key, shape) / 3 for key, shape in zip(keys, shapes, strict=True)]


def _put(devices, arrays, specs):
    return [jax.device_put(a, NamedSharding(devices, spec)) for a, spec in zip(arrays, specs, strict=True)]


def _of_lax(x, w, bias=None, relu=False, **settings):
    y = lax.conv_general_dilated(x, w, dimension_numbers=NHWC, **settings)
    y = y if bias is None else y + bias
    return jax.nn.relu(y) if relu else y


def _of_jaxgrad(x, w, bias=None, relu=False, implementation=CONV_KERNEL, **settings):
    activation = "relu" if relu else None
    return jaxgrad.conv_general_dilated(
        x, w, dimension_numbers=NHWC, bias=bias, activation=activation, implementation=implementation, **settings
    )


def _value_and_gradients(conv, *arrays):
    def loss(*arrays):
        y = conv(*arrays)
        return jnp.sum(jnp.sin(y)), y

    (_, y), gradients = jax.value_and_grad(loss, tuple(range(len(arrays))), has_aux=True)(*arrays)
    return y, *gradients


def _types(arrays):
    """Dtypes, shapes and shardings, as JAX types them."""
    return [str(jax.typeof(array)) for array in arrays]


_RESULTS = {}  # many shardings have the same result, which takes as long to compile as the call itself


def _of_whole_arrays(transform, settings, arrays):
    key = (transform, *sorted(settings.items()), *((a.shape, a.dtype, a.tobytes()) for a in arrays))
    if key not in _RESULTS:
        _RESULTS[key] = jax.jit(partial(transform, partial(_of_lax, **settings)))(*arrays)
    return _RESULTS[key]


def _check(
    arrays, *, implementation=CONV_KERNEL, transform=_value_and_gradients, modes=(jax.jit, lambda f: f), **settings
):
    """Shardings of the result and the gradients, and values, compiled and op by op.

    The values are those of arrays that are not split: XLA's partitioner doubles some weight gradients where an axis
    splits a spatial dimension.
    """
    types = _types(jax.eval_shape(partial(transform, partial(_of_lax, **settings)), *arrays))
    expected = _of_whole_arrays(transform, {**settings, "out_sharding": None}, tuple(map(np.asarray, arrays)))
    for mode in modes:
        found = mode(partial(transform, partial(_of_jaxgrad, implementation=implementation, **settings)))(*arrays)
        assert _types(found) == types, (_types(found), types)
        close(found, expected)


@needs(devices=4)
def check_shardings_of_the_operands():
    """The gradients have the shardings of the operands, which need not be those that the passes compute with."""
    devices = mesh(explicit=True, m=2)
    settings = {"window_strides": (1, 2), "padding": "SAME"}
    of_x = (P(), BATCH, SPACE, P("m", "d"), OUTPUT, P("d", None, None, "m"))
    of_w = (P(), INPUT, OUTPUT, P(None, None, "d", "m"))
    with jax.set_mesh(devices):
        for w_spec, x_spec in [*itertools.product(of_w, of_x)][::2]:  # each with two or three of the others
            x, w, _ = _put(devices, _arrays(), (x_spec, w_spec, P()))
            for implementation in (CONV_KERNEL, "xla") if x_spec == SPACE else (CONV_KERNEL,):
                out = {"out_sharding": P("d", None, None, "m"), "implementation": implementation}
                _check((x, w), modes=(jax.jit,), **out, **settings)


@needs(devices=4)
def check_shardings_of_the_result():
    devices = mesh(explicit=True, m=2)
    settings = {"window_strides": (2, 1), "padding": ((1, 0), (-1, 2))}
    with jax.set_mesh(devices):
        x, w, _ = _put(devices, _arrays(), (BATCH, OUTPUT, P()))
        specs = (P(), BATCH, P("m"), P(("d", "m")), OUTPUT, P(None, "d"), P("m", None, None, "d"))
        for spec in specs:
            modes = (jax.jit, lambda f: f) if spec in specs[1::2] else (jax.jit,)  # op by op takes a second
            _check((x, w), out_sharding=spec, modes=modes, **settings)
            _check((x, w), out_sharding=NamedSharding(devices, spec), modes=(jax.jit,), **settings)
        _check((x, w), out_sharding=NamedSharding(devices.abstract_mesh, BATCH), **settings)


@needs(devices=4)
def check_kinds_of_calls():
    """Cropped and dilated inputs, groups, a bias and relu, and the paths on XLA."""
    devices = mesh(explicit=True, m=2)
    out = P("m", None, None, "d")
    same = {"window_strides": (1, 1), "padding": "SAME", "out_sharding": out}
    cropped = {**same, "padding": ((-1, 2), (1, -1))}
    dilated = {**same, "padding": ((3, 0), (1, 4)), "lhs_dilation": (2, 1)}
    with jax.set_mesh(devices):
        for x_spec, w_spec in ((BATCH, P()), (SPACE, OUTPUT), (OUTPUT, INPUT)):
            x, w, bias = _put(devices, _arrays(), (x_spec, w_spec, P("d")))
            for settings in (cropped, dilated):
                _check((x, w), modes=(jax.jit,), **settings)
            for implementation, settings in itertools.product((CONV_KERNEL, "xla"), (same, dilated)):
                _check((x, w, bias), relu=True, implementation=implementation, modes=(jax.jit,), **settings)
        x, w, _ = _put(devices, _arrays(groups=2), (P("d", None, None, "m"), P(), P()))
        for implementation in (CONV_KERNEL, "xla", None):
            _check((x, w), feature_group_count=2, implementation=implementation, modes=(jax.jit,), **same)
        x, w, _ = _put(devices, _arrays(), (BATCH, OUTPUT, P()))
        _check((x[:, :1, :1, :1], w[:, :, :1]), implementation=None, **same)  # too small for a kernel on the CPU
        _check((x.astype(int), w.astype(int)), implementation=None, transform=lambda conv, *a: [conv(*a)], **same)


@needs(devices=4)
def check_without_a_mesh_context():
    """The operands and the NamedSharding name the mesh."""
    devices = mesh(explicit=True, m=2)
    settings = {"window_strides": (1, 1), "padding": "VALID"}
    for x_spec, w_spec, spec in ((BATCH, P(), OUTPUT), (SPACE, INPUT, BATCH)):
        x, w, _ = _put(devices, _arrays(), (x_spec, w_spec, P()))

        def transform(conv, x, w):
            y, pullback = jax.vjp(conv, x, w)
            return y, *pullback(y)

        _check((x, w), out_sharding=NamedSharding(devices, spec), transform=transform, **settings)


@needs(devices=4)
def check_transformations():
    devices = mesh(explicit=True, m=2)
    settings = {"window_strides": (1, 1), "padding": "SAME", "out_sharding": OUTPUT}

    def penalty(conv, x, w):
        return jax.grad(lambda *a: sum(jnp.sum(g**2) for g in _value_and_gradients(conv, *a)[1:]), (0, 1))(x, w)

    def mapped(conv, x, w):
        return [jax.vmap(conv, (0, None))(jnp.stack([x, x * 2]), w)]

    def rematerialized(conv, x, w):
        return _value_and_gradients(jax.checkpoint(conv), x, w)

    def forward_mode(conv, x, w):
        return jaxgrad.jvp(conv, (x, w), (w.sum() * x, x.sum() * w))

    with jax.set_mesh(devices):
        arrays = _put(devices, _arrays()[:2], (BATCH, OUTPUT))
        for transform in (penalty, rematerialized, forward_mode):
            _check(arrays, transform=transform, modes=(jax.jit,), **settings)
        _check(_put(devices, _arrays()[:2], (P(), P())), transform=mapped, modes=(jax.jit,), **settings)


@needs(devices=4)
def check_errors():
    explicit, auto = mesh(explicit=True), mesh()
    x, w, _ = _arrays()

    def error_of(conv, mesh_context, **settings):
        context = nullcontext() if mesh_context is None else jax.set_mesh(mesh_context)
        with context, pytest.raises(Exception, match=r"\S") as raised:
            conv(x[:6], w, window_strides=(1, 1), padding="SAME", **settings)
        return raised.type, str(raised.value).split("This error occurs at source")[0]

    cases = (
        (None, P("d")),
        (explicit, P("other")),
        (explicit, P("d", "d")),
        (explicit, P(None, None, None, None, "d")),
        (explicit, P("d")),  # does not divide the batch
        (explicit, NamedSharding(mesh(explicit=True, m=2), P("d"))),
        (auto, P("d")),
        (auto, NamedSharding(auto, P(None, "d"))),
    )
    for context, sharding in cases:
        for implementation in (CONV_KERNEL, "xla", None):
            found = error_of(partial(_of_jaxgrad, implementation=implementation), context, out_sharding=sharding)
            assert found == error_of(_of_lax, context, out_sharding=sharding), (sharding, found)


def check_axes_that_are_not_explicit():
    """A spec that names no axis changes nothing."""
    devices = mesh()
    settings = {"window_strides": (1, 1), "padding": "SAME"}
    conv = partial(_of_jaxgrad, **settings)
    x, w, _ = _arrays()
    expected = jax.jit(partial(_value_and_gradients, partial(_of_lax, **settings)))(x, w)
    for sharding in (P(), NamedSharding(devices, P())):
        gradients = jax.jit(partial(_value_and_gradients, partial(conv, out_sharding=sharding)))
        with jax.set_mesh(devices):
            compiled = gradients.lower(*_put(devices, (x, w), (BATCH, P()))).compile()
            found = compiled(*_put(devices, (x, w), (BATCH, P())))
        close(found, expected)
        assert collectives(compiled.as_text()) == {"all-reduce": 1}
        assert found[0].sharding.spec == found[1].sharding.spec == BATCH

        def inside(x, w, sharding=sharding):
            return jax.shard_map(
                partial(conv, out_sharding=sharding if isinstance(sharding, P) else None),
                mesh=devices,
                in_specs=(BATCH, P()),
                out_specs=BATCH,
            )(x, w)

        close(jax.jit(inside)(x, w), _of_lax(x, w, **settings))


@on_devices(
    [check_shardings_of_the_operands],
    [check_transformations, check_errors, check_axes_that_are_not_explicit],
    [check_shardings_of_the_result, check_without_a_mesh_context],
    [check_kinds_of_calls],
    oldest=2,
)
def test_out_sharding(run_python, platform, checks):
    run_checks(run_python, platform, __file__, checks)
