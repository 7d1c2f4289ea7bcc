"""Poolings of `jax.lax` and flax in accelerated functions: the kernels that take them, results, and reports."""

from __future__ import annotations

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import transformations
from backends import CPU_KERNEL, CUDA, float64_on_cpu
from jax import lax
from jax.sharding import PartitionSpec as P
from mesh_running import OWN_KERNEL, mesh, on_devices, over, run_checks
from pool_cases import assert_same_bits, make_inputs, random_case, value_and_gradient
from thorough import thorough_after
from tolerances import DTYPES

import jaxgrad

pytestmark = pytest.mark.jax_version

BACKENDS = (CPU_KERNEL, CUDA)
MAX, SUM, GRADIENT = "max_pool_forward", "sum_pool_forward", "max_pool_input_gradient"


def _passes(lowered) -> set[str]:
    """The kernels in a lowered program; with "xla", if XLA has a pooling left."""
    text = lowered if isinstance(lowered, str) else lowered.as_text()
    found = set(re.findall(r"custom_call @jaxgrad_(?:cpu|cuda)_(\w+)", text))
    return found | {"xla"} if re.search(r"stablehlo\.(?:reduce_window|select_and_scatter)", text) else found


def _pooled(x, scale):
    """A maximum with overlapping windows, and a mean."""
    y = lax.reduce_window(x * scale, -jnp.inf, lax.max, (1, 3, 2, 1), (1, 2, 1, 1), "SAME")
    return lax.reduce_window(y, 0.0, lax.add, (1, 2, 2, 1), (1, 2, 2, 1), "VALID") / 4


def _arrays(dtype=np.float32):
    rng = np.random.default_rng(0)
    return rng.normal(size=(2, 9, 8, 5)).astype(dtype), rng.normal(size=(5,)).astype(dtype)


TRANSFORMATIONS = {
    "value_and_grad": {MAX, SUM, GRADIENT},
    "vjp": {MAX, SUM, GRADIENT},
    "jacrev": {SUM, GRADIENT},  # XLA computes no maximum that the Jacobian does not need
    "gradients_of_a_gradient_penalty": {MAX, SUM, GRADIENT, "xla"},  # XLA has the tangents
    "scan": {MAX, SUM, GRADIENT},
    "while_loop": {MAX, SUM},
    "cond": {MAX, SUM, GRADIENT},
    "nested_vmap": {MAX, SUM, GRADIENT},
    "jvp": {MAX, SUM, "xla"},
}


@pytest.mark.parametrize("name", TRANSFORMATIONS)
def test_matches_float64(backend, name):
    transformation = getattr(transformations, name)
    accelerated = jaxgrad.accelerate(_pooled, implementation=backend.implementation)
    arrays = backend.put(_arrays())
    lowered = jax.jit(partial(transformation, accelerated)).lower(arrays)
    assert _passes(lowered) == TRANSFORMATIONS[name]
    with float64_on_cpu():
        expected = jax.jit(partial(transformation, _pooled))(_arrays(np.float64))
    found = lowered.compile()(arrays)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), found, expected)


@pytest.mark.newest
@pytest.mark.parametrize("seed", thorough_after(12, range(500)))
def test_bits_of_xla_for_random_calls(backend, seed):
    """Of maxima and their gradients; `random_case` has up to two axes of the batch, or none."""
    case = random_case(seed)
    x, dy = make_inputs(case, list(DTYPES)[seed % 4], special=False)
    dy = np.round(np.float64(dy) * 4).astype(dy.dtype)  # whose sums are exact in any order
    accelerated = jaxgrad.accelerate(case.lax, implementation=backend.implementation)
    lowered = jax.jit(value_and_gradient, static_argnums=0).lower(accelerated, *backend.put((x, dy)))
    is_pooled = case.window + case.strides != (1,) * 2 * len(case.window) or np.any(case.padding)
    assert _passes(lowered) == ({MAX, GRADIENT} if is_pooled and dy.size else {"xla"})
    expected = jax.jit(value_and_gradient, static_argnums=0)(case.lax, *CPU_KERNEL.put((x, dy)))
    for actual, desired in zip(lowered.compile()(*backend.put((x, dy))), expected, strict=True):
        assert_same_bits(actual, desired)


@pytest.mark.parametrize("seed", range(6))
def test_sums(backend, seed):
    case = random_case(seed, dilated=seed % 2 == 0)
    x, _ = make_inputs(case, "float32", special=False)

    def mean(x):
        return case.lax_mean(x, count_include_pad=True)

    accelerated = jax.jit(jaxgrad.accelerate(mean, implementation=backend.implementation))
    expected = np.float64(mean(x))
    np.testing.assert_allclose(accelerated(backend.put(x)), expected, rtol=1e-5, atol=1e-5)


def _window(x, operation=lax.max, start=-jnp.inf, **settings):
    ones = (1,) * x.ndim
    settings = {"window_dimensions": (1, 3, 2, 1), "window_strides": ones, "padding": ((0, 0),) * x.ndim, **settings}
    return lax.reduce_window(x, x.dtype.type(start), operation, **settings)


X = np.random.default_rng(0).normal(size=(2, 9, 8, 5)).astype(np.float32)

# A pooling that no kernel takes, and why.
LEFT = {
    "integers": (
        partial(_window, start=np.iinfo(np.int32).min),
        X.astype(np.int32),
        "float32, float64, bfloat16, float16, not int32",
    ),
    "base dilation": (partial(_window, base_dilation=(1, 2, 1, 1)), X, "base dilation"),
    "negative padding": (partial(_window, padding=((0, 0), (-1, 2), (0, 0), (0, 0))), X, "negative padding"),
    "trivial windows": (partial(_window, window_dimensions=(1,) * 4), X, "every window is one element"),
    "no elements": (_window, X[:0], "an array has no elements"),
    "four axes": (partial(_window, window_dimensions=(2,) * 4), X, "1 to 3 spatial axes"),
    "gradient of a minimum": (jax.grad(lambda x: _window(x, lax.min, jnp.inf).sum()), X, "gradient of a minimum"),
}


@pytest.mark.parametrize("name", LEFT)
def test_left_to_xla(name):
    function, x, reason = LEFT[name]
    accelerated = jaxgrad.accelerate(function, implementation="cpu")
    assert _passes(jax.jit(accelerated).lower(x)) <= {"xla"}
    np.testing.assert_array_equal(accelerated(x), function(x))
    (call,) = jaxgrad.report(accelerated, x, platform="cpu").calls
    assert (call.implementation, call.moved) == ("xla", "")
    assert reason in call.reason


def test_axes_in_any_order():
    """A spatial axis first, an axis between the spatial ones, and channels before them."""
    for dims in ((2, 1, 2, 1), (2, 2, 1, 1), (1, 1, 3, 2), (1, 2, 1, 3), (1, 1, 1, 2)):
        function = partial(_window, window_dimensions=dims, window_strides=dims)
        accelerated = jaxgrad.accelerate(jax.grad(lambda x, f=function: jnp.sum(jnp.sin(f(x)))))
        assert _passes(jax.jit(accelerated).lower(X)) == {MAX, GRADIENT}
        assert_same_bits(accelerated(X), jax.grad(lambda x, f=function: jnp.sum(jnp.sin(f(x))))(X))


def test_implementations():
    """ "xla" switches acceleration off, and that of another op leaves poolings to XLA."""
    for implementation, expected in (("xla", {"xla"}), ("onednn", {"xla"}), ("cpu", {MAX}), (None, {MAX})):
        accelerated = jaxgrad.accelerate(_window, implementation=implementation)
        assert _passes(jax.jit(accelerated).lower(X)) == expected
    with jaxgrad.accelerate():
        assert _passes(jax.jit(lambda x: _window(x) + 1).lower(X)) == {MAX}
    assert _passes(jax.jit(lambda x: _window(x) + 1).lower(X)) == {"xla"}


def test_ops_are_not_accelerated_again():
    """XLA runs what `implementation="xla"` of an op says."""
    accelerated = jaxgrad.accelerate(lambda x: jaxgrad.max_pool(x, (2, 2), implementation="xla"))
    assert _passes(jax.jit(accelerated).lower(X)) == {"xla"}


CUMULATIVE = {
    "cumsum": lambda x: jnp.cumsum(x, 1),
    "cummax": lambda x: lax.cummax(x, 2, reverse=True),
    "gradient": jax.grad(lambda x: jnp.sum(jnp.sin(jnp.cumsum(x, 2)))),
    "vmap": jax.vmap(jnp.cumsum),
    "scan": lambda x: lax.scan(lambda carry, x: (carry + jnp.cumsum(x, 0), None), x[0] * 0, x)[0],
    "choice": lambda x: jax.random.choice(jax.random.key(0), 8, (3,), p=jnp.abs(x[0, 0, :, 0])),
    "after a pooling": lambda x: jnp.cumsum(_window(x), 1),
}


@pytest.mark.parametrize("implementation", [None, "cpu"])
@pytest.mark.parametrize("name", CUMULATIVE)
def test_cumulative_operations(name, implementation):
    """JAX lowers them to `reduce_window`, whose form on XLA takes less time than windows as long as the axis."""
    accelerated = jaxgrad.accelerate(CUMULATIVE[name], implementation=implementation)
    np.testing.assert_allclose(jax.jit(accelerated)(X), CUMULATIVE[name](X), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(accelerated(X), CUMULATIVE[name](X), rtol=1e-5, atol=1e-6)
    assert _passes(jax.jit(accelerated).lower(X)) <= {MAX, "xla"}


def test_symbolic_shapes():
    shape = jax.export.symbolic_shape("n, 9, 8, 5")
    checks = jaxgrad.export_disabled_checks()
    accelerated = jax.jit(jaxgrad.accelerate(_window))
    exported = jax.export.export(accelerated, disabled_checks=checks)(jax.ShapeDtypeStruct(shape, "float32"))
    np.testing.assert_array_equal(exported.call(X), _window(X))


def test_flax():
    linen = pytest.importorskip("flax.linen")

    def function(x):
        return linen.avg_pool(linen.max_pool(x, (2, 2), (2, 2)), (3, 3), padding="SAME", count_include_pad=False)

    accelerated = jaxgrad.accelerate(jax.grad(lambda x: jnp.sum(jnp.sin(function(x)))))
    assert _passes(jax.jit(accelerated).lower(X)) == {MAX, SUM, GRADIENT}


def test_report():
    found = jaxgrad.report(jaxgrad.accelerate(jax.grad(lambda x: _pooled(x, 1.0).sum())), X, platform="cpu")
    calls = [(call.op, call.pass_name, call.implementation, call.moved) for call in found.calls]
    selected = ("cpu", "selected")
    assert (
        calls
        == [
            ("max_pool", "forward", *selected),
            ("avg_pool", "forward", *selected),
            ("avg_pool", "forward", *selected),  # its gradient
            ("max_pool", "input_gradient", *selected),
        ][: len(calls)]
        or set(calls) == {("max_pool", "input_gradient", *selected), ("avg_pool", "forward", *selected)}
    )
    assert "max_pool x=f32[2,9,8,5] window=3x2 strides=2x1" in found.details()
    assert "a small gain is possible" in found.summary
    plain = jaxgrad.report(jax.grad(lambda x: _pooled(x, 1.0).sum()), X, platform="cpu")
    assert {call.reason for call in plain.calls} == {"not accelerated"}


def test_tune():
    with jax.default_device(jax.devices("cpu")[0]):
        tuning = jaxgrad.tune(jaxgrad.accelerate(jax.grad(lambda x: jnp.sum(jnp.sin(_window(x))))), X)
    ((text, choice),) = next(iter(tuning.machines.values())).items()
    assert text == "max_pool x=f32[2,9,8,5] window=3x2 strides=1x1 dilation=1x1 padding=0,0 0,0 channels_last"
    with jaxgrad.config.override(tuning=tuning):
        lowered = jax.jit(jaxgrad.accelerate(_window)).lower(X)
    assert _passes(lowered) == ({MAX} if choice.implementation == "cpu" else {"xla"})


def test_programs_for_another_platform():
    """A program for GPUs, on a machine without one, has XLA's poolings."""
    traced = jax.jit(jaxgrad.accelerate(_window)).trace(X)
    assert _passes(traced.lower(lowering_platforms=("tpu",))) == {"xla"}
    assert _passes(traced.lower(lowering_platforms=("cpu",))) == {MAX}


def _loss(x):
    return jnp.sum(jnp.sin(_pooled(x, 1.0)))


def check_a_split_batch():
    accelerated = jaxgrad.accelerate(jax.grad(_loss), implementation=OWN_KERNEL)
    x = jax.random.normal(jax.random.key(0), (16, 9, 8, 8))
    for explicit in (False, True):
        for spec in (P("d"), P(None, None, None, "d")):
            _, found = over(mesh(explicit=explicit), accelerated, (x,), (spec,), jax.grad(_loss)(x))
            assert not found, found


def check_inside_shard_map():
    x = jax.random.normal(jax.random.key(0), (16, 9, 8, 3))
    devices = mesh()
    mapped = jax.shard_map(jax.grad(_loss), mesh=devices, in_specs=P("d"), out_specs=P("d"))
    lowered = jax.jit(jaxgrad.accelerate(mapped, implementation=OWN_KERNEL)).lower(x)
    assert _passes(lowered) == {MAX, SUM, GRADIENT}, _passes(lowered)
    np.testing.assert_allclose(lowered.compile()(x), jax.grad(_loss)(x), rtol=1e-5, atol=1e-5)


@on_devices([check_a_split_batch, check_inside_shard_map])
def test_over_a_mesh(run_python, platform, checks):
    run_checks(run_python, platform, __file__, checks)
