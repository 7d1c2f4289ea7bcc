"""Threads, bitwise equality, export, NaN checks, and strict settings of JAX."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import gru_references
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from backends import GRU, SELECTED
from cuda_module import NEEDS_CUDA_MODULE
from gru_cases import Case, fill_padding, make_inputs
from gru_running import values_and_gradients
from jax import export
from tolerances import DTYPES, assert_results_close

import jaxgrad
from jaxgrad._src.native import cuda

BACKENDS = GRU

CASE = Case(T=4, B=3, I=2, H=5, direction="bidirectional", linear_before_reset=True)


def test_many_threads_at_once(backend):
    """Eight threads, each with its own shape, call the forward and backward passes repeatedly."""
    cases = [Case(T=3 + i, B=1 + 2 * i, I=2, H=4 * i + 3, linear_before_reset=i % 2 == 0) for i in range(8)]
    drawn = [make_inputs(case, "float32") for case in cases]

    def work(i):
        return [values_and_gradients(backend, *drawn[i], cases[i].settings) for _ in range(6)]

    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(work, range(8)))
    for i, found in enumerate(together):
        expected = values_and_gradients(backend, *drawn[i], cases[i].settings)
        for one in found:
            jax.tree.map(np.testing.assert_array_equal, one, expected)


def test_the_same_program_from_many_threads(backend):
    inputs, cotangents = make_inputs(Case(T=9, B=17, I=8, H=33), "float32")
    expected = values_and_gradients(backend, inputs, cotangents, {})
    with ThreadPoolExecutor(8) as pool:
        for found in pool.map(lambda _: values_and_gradients(backend, inputs, cotangents, {}), range(24)):
            jax.tree.map(np.testing.assert_array_equal, found, expected)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_repeated_calls_are_bitwise_equal(backend, dtype):
    inputs, cotangents = make_inputs(Case(T=9, B=17, I=8, H=33), dtype)
    first, *others = (values_and_gradients(backend, inputs, cotangents, {}) for _ in range(5))
    for other in others:
        jax.tree.map(np.testing.assert_array_equal, other, first)


@pytest.mark.parametrize("serialized", [False, True])
@pytest.mark.parametrize("differentiated", ["before", "after"])
def test_export_round_trip(backend, serialized, differentiated):
    """A module is exported with its gradient, or differentiated after the import."""
    if serialized:
        pytest.importorskip("flatbuffers", reason="JAX serializes with flatbuffers")
    inputs = backend.put(make_inputs(CASE, "float32")[0])

    def loss(x, w):
        return jnp.sum(backend.gru(*inputs._replace(x=x, w=w), **CASE.settings)[0] ** 2)

    def with_gradients(function):
        return jax.value_and_grad(function, argnums=(0, 1))

    function = jax.jit(with_gradients(loss) if differentiated == "before" else loss)
    platforms = ["cuda" if backend.platform == "gpu" else "cpu"]
    # Shapes, not arrays: JAX cannot differentiate a module that was exported for arrays committed to a device.
    shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (inputs.x, inputs.w)]
    exported = export.export(function, disabled_checks=jaxgrad.export_disabled_checks(), platforms=platforms)(*shapes)
    if serialized:
        exported = export.deserialize(exported.serialize(vjp_order=int(differentiated == "after")))
    restored = exported.call if differentiated == "before" else with_gradients(exported.call)
    found, expected = restored(inputs.x, inputs.w), with_gradients(loss)(inputs.x, inputs.w)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), found, expected)


def test_export_for_two_platforms_holds_both_implementations():
    """With `implementation=None`: the kernel for the CPU, and XLA for a GPU that this machine lacks."""
    if cuda.gpu_ordinal() is not None:
        pytest.skip("the kernel for a GPU is selected where there is one")
    case = CASE.replace(T=9)
    inputs = make_inputs(case, "float32")[0]
    call = jax.jit(lambda *arrays: SELECTED[0].gru(*arrays, **case.settings))

    def module(*platforms):
        return export.export(call, disabled_checks=jaxgrad.export_disabled_checks(), platforms=platforms)(
            *inputs
        ).mlir_module()

    kernel, scan = "stablehlo.custom_call @jaxgrad_cpu_gru_forward", "stablehlo.while"
    both, cpu, gpu = module("cpu", "cuda"), module("cpu"), module("cuda")
    assert (kernel in both, kernel in cpu, kernel in gpu) == (True, True, False)
    assert (scan in both, scan in cpu, scan in gpu) == (True, False, True)


@pytest.mark.parametrize(("dtype", "linear_before_reset"), [*((d, True) for d in DTYPES), ("bfloat16", False)])
def test_strict_dtype_promotion(backend, dtype, linear_before_reset):
    case = Case(linear_before_reset=linear_before_reset, clip=3.0, direction="reverse")
    inputs, cotangents = make_inputs(case, dtype)
    with jax.numpy_dtype_promotion("strict"):
        found = values_and_gradients(backend, inputs, cotangents, case.settings)
        # JAX converts the lengths outside the compiled call.
        lens = jnp.asarray(inputs.sequence_lens, jnp.int64)
        backend.gru(*backend.put(inputs._replace(sequence_lens=lens)), **case.settings)
    expected = gru_references.values_and_gradients(inputs, cotangents, **case.settings)
    assert_results_close(found, expected, dtype=dtype, terms=case.terms, backend=backend)


@pytest.mark.parametrize("jitted", [False, True])
@pytest.mark.parametrize("padding", [0.0, np.nan])
def test_debug_nans(backend, jitted, padding):
    """No intermediate NaN, from the padding or from uninitialized memory."""
    case = CASE.replace(T=9)
    inputs = backend.put(fill_padding(make_inputs(case, "float32")[0], padding))

    def loss(w):
        return sum(jnp.sum(out**2) for out in backend.gru(*inputs._replace(w=w), **case.settings))

    gradient = jax.jit(jax.grad(loss)) if jitted else jax.grad(loss)
    with jax.debug_nans(True):
        assert np.isfinite(gradient(inputs.w)).all()


def test_rank_promotion_raised(backend):
    inputs, cotangents = make_inputs(CASE, "float32")
    with jax.numpy_rank_promotion("raise"):
        found = values_and_gradients(backend, inputs, cotangents, CASE.settings)
    expected = gru_references.values_and_gradients(inputs, cotangents, **CASE.settings)
    assert_results_close(found, expected, dtype="float32", terms=CASE.terms, backend=backend)


_WITHOUT_X64 = """
import jax, numpy as np, gru_references
from gru_cases import Case, fill_padding, make_inputs
import jaxgrad
assert not jax.config.jax_enable_x64
import jax.numpy as jnp

for implementation in ("cpu", "xla"):
    with jax.default_device(jax.devices("cpu")[0]):
        for clip in (None, 0.7):
            case = Case(direction="bidirectional", clip=clip)
            inputs, cotangents = make_inputs(case, "float32")
            wide = fill_padding(inputs, np.nan)._replace(sequence_lens=inputs.sequence_lens.astype(np.int64))

            def loss(w):
                y, y_h = jaxgrad.gru(**wide._replace(w=w)._asdict(), **case.settings, implementation=implementation)
                return jnp.vdot(y, cotangents.y) + jnp.vdot(y_h, cotangents.y_h), (y, y_h)

            gradient, (y, y_h) = jax.jit(jax.grad(loss, has_aux=True))(inputs.w)
            assert {a.dtype for a in (gradient, y, y_h)} == {jnp.dtype("float32")}
            expected, expected_h, _ = gru_references.numpy_forward(inputs, **case.settings)
            np.testing.assert_allclose(y, expected, rtol=0, atol=2e-6)
            np.testing.assert_allclose(y_h, expected_h, rtol=0, atol=2e-6)
            np.savez(f"{implementation}-{clip}.npz", gradient=gradient)
    # JAX converts a float64 NumPy array to float32.
    y, _ = jaxgrad.gru(*(None if a is None else np.asarray(a, np.float64) for a in inputs[:3]),
                       direction="bidirectional", implementation=implementation)
    assert y.dtype == jnp.float32
"""


def test_without_64_bit_types(run_python, tmp_path):
    run_python(f"import os; os.chdir({str(tmp_path)!r})\n" + _WITHOUT_X64, JAX_ENABLE_X64="0")
    for clip in (None, 0.7):
        case = Case(direction="bidirectional", clip=clip)
        inputs, cotangents = make_inputs(case, "float32")
        _, _, expected = gru_references.values_and_gradients(inputs, cotangents, **case.settings)
        for implementation in ("cpu", "xla"):
            gradient = np.load(tmp_path / f"{implementation}-{clip}.npz")["gradient"]
            np.testing.assert_allclose(gradient, expected.w, rtol=0, atol=1e-5)


@NEEDS_CUDA_MODULE
def test_loaded_kernels_are_bounded(on_fake_cuda):
    """One kernel for each set of flags and a few hidden sizes. The cache keeps those used last."""
    found = on_fake_cuda("""
from fake_gpu import *
flags = (False, True)
cuda.nvrtc_unavailable()

def load(hidden, is_backward, tf32, *others):
    linear_before_reset, *features = others
    assert not cuda.module.load_gru_kernel(is_backward, 0, 0, tf32, linear_before_reset, 1, 4, hidden, *features)

for settings in itertools.product((20, 50, 80, 300), *[flags] * 7):
    *_, has_resets, has_reset_h, has_clip = settings
    if has_resets or not has_reset_h:
        load(*settings)
compiled, loaded = fake.fake_compilations(), fake.fake_modules()
load(*settings)
last = fake.fake_compilations()
load(20, *[False] * 7)
report(found=[compiled, loaded, fake.fake_modules()], last=last, first=fake.fake_compilations())
""")
    compiled, *loaded = found["found"]
    assert compiled > 2 * 64
    assert loaded == [64, 64]
    assert (found["last"], found["first"]) == (compiled, compiled + 1)
