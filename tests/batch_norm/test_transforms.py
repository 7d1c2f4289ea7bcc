"""Batch normalisation under JAX's transformations: derivatives of derivatives, `vmap`, scan, checkpoint, threads."""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from backends import BATCH_NORM
from batch_norm_references import (
    Case,
    in_float64,
    inference,
    make_inputs,
    plain_training,
    training,
    values_and_gradients,
)
from jax import lax
from jax.test_util import check_grads

import jaxgrad

BACKENDS = BATCH_NORM
N = 3  # examples
NAMES = ("x", "scale", "bias", "residual")


def _call(backend, case):
    return lambda x, scale, bias, residual: training(backend)(x, scale, bias, residual=residual, **case.settings)


@pytest.mark.parametrize("axis", [-1, 1])
@pytest.mark.parametrize(("activation", "residual"), [(None, False), ("relu", False), ("relu", True)])
def test_second_derivatives(backend, axis, activation, residual):
    case = Case((5, 3, 4), axis, residual, activation, dtypes=("float64",) * 3)
    given = [a for a in make_inputs(case)[0] if a is not None]
    call = jax.jit(lambda *given: _call(backend, case)(*given, *[None] * (4 - len(given))))
    check_grads(call, backend.put(given), order=2, modes=["rev"], atol=1e-4, rtol=1e-4)


def test_second_derivatives_with_frozen_statistics(backend):
    x, scale, bias, _ = make_inputs(Case((5, 3, 4), dtypes=("float64",) * 3))[0]
    arrays = backend.put((x, scale, bias, bias + 0.2, scale**2 + 0.3))
    check_grads(jax.jit(inference(backend)), arrays, order=2, modes=["rev"], atol=1e-4, rtol=1e-4)


def _third_order(call, x):
    """A derivative of a gradient's gradient, which weighs every element differently."""

    def weigh(f):
        return lambda x: jnp.vdot(jnp.cos(jnp.arange(x.size)).reshape(x.shape), f(x))

    first = jax.grad(lambda x: jnp.sum(call(x).y ** 3) + jnp.sum(call(x).var ** 2))
    return jax.grad(weigh(jax.grad(weigh(first))))(x)


def test_third_derivatives(backend):
    case = Case((5, 4), dtypes=("float64",) * 3)
    x, scale, bias, _ = make_inputs(case)[0]
    found = _third_order(lambda x: training(backend)(x, scale, bias, **case.settings), backend.put(x))
    expected = _third_order(lambda x: plain_training(x, scale, bias, **case.settings), jnp.asarray(x))
    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-9)


def _values_and_gradients(call, *inputs):
    def loss(inputs):
        results = call(*inputs)
        weight = jnp.cos(jnp.arange(results.y.size)).reshape(results.y.shape)
        return jnp.vdot(weight, results.y) + jnp.sum(results.mean**2) + jnp.sum(results.var**2), results

    return jax.value_and_grad(loss, has_aux=True)(inputs)


@pytest.mark.parametrize("names", [n for k in range(1, 5) for n in itertools.combinations(NAMES, k)], ids="-".join)
@pytest.mark.parametrize(
    ("shape", "axis"), [((4, 5, 3), -1), pytest.param((3, 4, 6), 0, marks=pytest.mark.thorough)], ids=str
)
def test_every_subset_of_mapped_arguments(backend, names, shape, axis):
    case = Case(shape, axis, residual=True, activation="relu", dtypes=("float64",) * 3)
    drawn = [make_inputs(case.replace(seed=seed))[0] for seed in range(N)]
    inputs = backend.put(
        tuple(np.stack([getattr(d, n) for d in drawn]) if n in names else getattr(drawn[0], n) for n in NAMES)
    )
    in_axes = tuple(0 if name in names else None for name in NAMES)
    run = partial(_values_and_gradients, _call(backend, case))
    found = jax.jit(jax.vmap(run, in_axes=in_axes))(*inputs)
    alone = jax.jit(run)
    each = [alone(*(a if axis is None else a[i] for a, axis in zip(inputs, in_axes, strict=True))) for i in range(N)]
    jax.tree.map(lambda a, *b: np.testing.assert_allclose(a, np.stack(b), rtol=1e-10, atol=1e-10), found, *each)


@pytest.mark.parametrize("in_axes", [(0, None, None, None, None), (2, 0, None, None, 1), (None, None, 0, 0, None)])
def test_vmap_with_frozen_statistics(backend, in_axes):
    x, scale, bias, _ = make_inputs(Case((4, 5, 3), dtypes=("float64",) * 3))[0]
    single = (x, scale, bias, bias + 0.2, scale**2 + 0.3)
    inputs = backend.put(
        tuple(a if axis is None else np.stack([a, 2 * a, a + 1], axis) for a, axis in zip(single, in_axes, strict=True))
    )

    def run(*inputs):
        return jax.grad(lambda inputs: jnp.sum(jnp.sin(inference(backend)(*inputs))))(inputs)

    found = jax.jit(jax.vmap(run, in_axes=in_axes))(*inputs)
    for i in range(N):
        one = [a if axis is None else jnp.take(a, i, axis) for a, axis in zip(inputs, in_axes, strict=True)]
        for a, b in zip(found, run(*one), strict=True):
            np.testing.assert_allclose(a[i], b, rtol=1e-10, atol=1e-10)


def test_nested_vmap(backend):
    x = backend.put(np.random.default_rng(0).standard_normal((2, 3, 4, 5)))
    scale, bias = backend.put((np.linspace(1, 2, 10).reshape(2, 5), np.linspace(-1, 1, 5)))
    call = lambda x, scale: training(backend)(x, scale, bias)  # noqa: E731
    found = jax.vmap(jax.vmap(call, in_axes=(0, None)), in_axes=(0, 0))(x, scale)
    for i, j in itertools.product(range(2), range(3)):
        jax.tree.map(
            lambda a, b, i=i, j=j: np.testing.assert_allclose(a[i, j], b, rtol=1e-12), found, call(x[i, j], scale[i])
        )


def test_vmap_is_one_kernel_call():
    """The mapped axis joins the channels; there is no loop."""
    x, c = jnp.ones((7, 4, 5)), jnp.ones(5)
    call = jax.vmap(lambda x: jaxgrad.batch_norm_training(x, c, c, implementation="cpu")[0])
    text = jax.jit(call).lower(x).as_text()
    assert text.count("stablehlo.custom_call @jaxgrad_batch_norm") == 2
    assert "while" not in text


def test_only_requested_gradients_are_computed():
    x, c = jnp.ones((4, 5)), jnp.ones(5)

    def compiled(function):
        text = jax.jit(function).lower(x).compile().as_text()
        names = ("statistics", "normalise", "backward")
        return [f'custom_call_target="jaxgrad_batch_norm_{name}"' in text for name in names]

    def call(x):
        return jaxgrad.batch_norm_training(x, c, c, implementation="cpu")

    assert compiled(lambda x: call(x)[0]) == [True, True, False]
    assert compiled(lambda x: call(x)[1:]) == [True, False, False]
    assert compiled(lambda x: jax.vjp(lambda x: call(x)[0], x)[1](x)) == [True, False, True]


def test_checkpoint_scan_and_donation(backend):
    case = Case((6, 5), activation="relu", dtypes=("float64",) * 3)
    x, scale, bias, _ = backend.put(make_inputs(case)[0])

    def layers(call, x):
        def step(x, _):
            results = jax.checkpoint(lambda x: call(x, scale, bias, **case.settings))(x)
            return x + results.y, results.var

        x, variances = lax.scan(step, x, None, length=3)
        return jnp.sum(x**2) + jnp.sum(variances)

    ours = jax.jit(jax.value_and_grad(partial(layers, training(backend))), donate_argnums=0)
    expected = jax.value_and_grad(partial(layers, plain_training))(x)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-9), ours(x.copy()), expected)


@pytest.mark.parametrize(("shape", "axis"), [(("b", "h", 8, 5), -1), (("b", 5, "h"), 1), ((4, "b"), -1)], ids=str)
def test_symbolic_shapes(shape, axis):
    """Shape-polymorphic export, whose program runs on XLA."""
    x_shape = jax.export.symbolic_shape(", ".join(map(str, shape)))
    x = jax.ShapeDtypeStruct(x_shape, np.float64)
    channels = jax.ShapeDtypeStruct((x_shape[axis],), np.float64)

    def gradients(x, scale, residual):
        def loss(x, scale):
            settings = {"feature_axis": axis, "activation": "relu", "residual": residual}
            y, mean, var = jaxgrad.batch_norm_training(x, scale, scale, **settings)
            return jnp.sum(y**3) + jnp.sum(mean**2) + jnp.sum(var**2)

        return jax.grad(loss, (0, 1))(x, scale)

    exported = jax.export.export(jax.jit(gradients), platforms=["cpu"])(x, channels, x)
    (x, scale, _, residual), _ = make_inputs(
        Case(tuple(n if isinstance(n, int) else 6 for n in shape), axis, True, dtypes=("float64",) * 3)
    )
    with jax.default_device(jax.devices("cpu")[0]):
        found, expected = exported.call(x, scale, residual), jax.jit(gradients)(x, scale, residual)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-9), found, expected)


def test_threads(backend):
    """Eight at once, large enough to share the pool's threads; each gets the bits that it gets alone."""
    drawn = [backend.put(make_inputs(Case((5 + i, 40, 50, 9), dtypes=("float32",) * 3))) for i in range(4)]
    alone = [values_and_gradients(training(backend), inputs[:3], cotangents) for inputs, cotangents in drawn]
    with ThreadPoolExecutor(8) as pool:
        runs = [pool.submit(values_and_gradients, training(backend), d[0][:3], d[1]) for d in drawn * 4]
        for run, expected in zip(runs, alone * 4, strict=True):
            jax.tree.map(np.testing.assert_array_equal, run.result(), expected)


_OTHER_SETTINGS = """
import jax, hashlib, numpy as np, os
if os.environ.get("ONE_CORE"):
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
from batch_norm_references import Case, make_inputs, training, values_and_gradients
from backends import CPU_KERNEL
digest = hashlib.sha256()
for shape, axis in (((9, 40, 50, 9), -1), ((4, 6, 99, 98), 1)):
    inputs, cotangents = make_inputs(Case(shape, axis))
    call = lambda x, scale, bias: training(CPU_KERNEL)(x, scale, bias, feature_axis=axis)
    for leaf in jax.tree.leaves(values_and_gradients(call, inputs[:3], cotangents)):
        digest.update(np.asarray(leaf).tobytes())
print(digest.hexdigest())
"""


def test_results_do_not_depend_on_the_number_of_threads(run_python):
    several = run_python(_OTHER_SETTINGS, JAX_PLATFORMS="cpu").stdout
    alone = run_python(_OTHER_SETTINGS, JAX_PLATFORMS="cpu", ONE_CORE="1").stdout
    assert several == alone


_STRICT = """
import jax, jax.numpy as jnp, numpy as np
from batch_norm_references import Case, make_inputs, training, inference, values_and_gradients
from backends import CPU_KERNEL, XLA
assert not jax.config.jax_enable_x64
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_debug_nans", True)
for backend in (CPU_KERNEL, XLA):
    for dtypes in (("float32",) * 3, ("bfloat16", "bfloat16", "float32"), ("float16",) * 3):
        for residual in (False, True):
            case = Case((5, 4, 3), 1, residual, "relu", dtypes)
            inputs, cotangents = make_inputs(case)
            call = lambda x, scale, bias, residual: training(backend)(
                x, scale, bias, residual=residual, statistics_dtype=dtypes[2], **case.settings)
            _, gradients = values_and_gradients(call, inputs, cotangents)
            assert [g.dtype for g in gradients if g is not None] == [i.dtype for i in inputs if i is not None]
            x, scale, bias, _ = inputs
            call = lambda *a: inference(backend)(*a, feature_axis=1)
            values_and_gradients(call, (x, scale, bias, bias, scale * scale), cotangents[:1])
            jax.grad(lambda x: jax.grad(lambda x: training(backend)(x, scale, bias, feature_axis=1).y.sum().astype(
                "float32"))(x).sum().astype("float32"))(x)
"""


def test_strict_settings_without_64_bit_types(run_python):
    run_python(_STRICT, JAX_PLATFORMS="cpu", JAX_ENABLE_X64="0")


_INSTRUCTION_SETS = """
import jax
jax.config.update("jax_enable_x64", True)
from batch_norm_references import Case, check_training
from backends import CPU_KERNEL
from jaxgrad import _cpu
for dtype in ("float32", "float64", "bfloat16", "float16"):
    for shape, axis, residual, activation in (
        ((7, 5, 16), 2, True, "relu"),
        ((33, 17), 1, False, None),
        ((5, 300), 1, False, "relu"),
        ((3, 4, 200), 1, True, "relu"),
    ):
        check_training(CPU_KERNEL, Case(shape, axis, residual, activation, (dtype,) * 3))
print(_cpu.build_info()["instruction_set"])
"""


@pytest.mark.parametrize("name", ["avx2", "baseline"])
def test_lesser_instruction_sets(run_python, name):
    found = run_python(_INSTRUCTION_SETS, JAX_PLATFORMS="cpu", JAXGRAD_CPU_ISA=name).stdout.split()[0]
    if found != name:
        pytest.skip(f"this machine has {found} only")


def test_float64_reference_matches_finite_differences():
    """The reference against finite differences, so that both could not be wrong alike."""
    inputs, _ = make_inputs(Case((5, 3, 4), residual=True, dtypes=("float64",) * 3))
    check_grads(partial(plain_training, feature_axis=-1), in_float64(tuple(inputs)), order=1, modes=["rev"])
