"""Threads, bitwise equality, export, NaN, and the cache of plans."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from backends import CONVOLUTION, ONEDNN, XLA_ON_GPU, Backend
from conv_cases import ConvCase, cotangent, make_conv_inputs
from conv_references import in_float64, lax_conv
from conv_running import assert_same, conv, conv_transpose, run, terms
from conv_transpose_cases import TransposeCase, make_transpose_inputs
from jax import export
from thorough import thorough_after

import jaxgrad
from jaxgrad import _cpu, config
from jaxgrad._src.conv.call.geometry import ConvGeometry
from jaxgrad._src.conv.call.problem import ConvProblem
from jaxgrad._src.conv.kernels.onednn import onednn_plan

BACKENDS = CONVOLUTION

CASE = ConvCase(strides=(2, 1), padding=((1, 0), (0, 2)), groups=2)


def _thread_cases():
    """Eight different shapes, layouts and settings."""
    layouts = [None, ("NHWC", "HWIO", "NHWC")]
    return [
        ConvCase(
            spatial=(5 + i, 6 + 3 * i),
            window=(1 + i % 3, 2),
            features=1 + i,
            out_features=2 * i + 3,
            groups=1 + i % 2,
            layout=layouts[i % 2],
            padding=((i, 0), (0, 1)),
            lhs_dilation=(2, 1) if i % 3 == 2 else None,
        )
        for i in range(8)
    ]


def test_many_threads_at_once(backend):
    """Eight threads, each with its own shape, call the three passes repeatedly."""
    cases = _thread_cases()
    drawn = [make_conv_inputs(case) for case in cases]
    dys = [cotangent(jax.eval_shape(lax_conv(c), *i).shape, "float32") for c, i in zip(cases, drawn, strict=True)]
    expected = [in_float64(lax_conv(c), i, dy) for c, i, dy in zip(cases, drawn, dys, strict=True)]

    def work(i):
        op = conv(backend, **cases[i].settings)
        gradients = jax.jit(lambda inputs, dy: (lambda y, pullback: (y, *pullback(dy)))(*jax.vjp(op, *inputs)))
        inputs, dy = backend.put(tuple(drawn[i])), backend.put(dys[i])
        return [jax.tree.map(np.asarray, gradients(inputs, dy)) for _ in range(10)]

    with ThreadPoolExecutor(8) as pool:
        for i, results in enumerate(pool.map(work, range(8))):
            for found in results:
                found = type(expected[i])(*found)
                assert_same(found, expected[i], dtype="float32", terms=terms(drawn[i], dys[i]), message=str(cases[i]))


def test_the_same_program_from_many_threads(backend):
    op, inputs = jax.jit(conv(backend, **CASE.settings)), backend.put(tuple(make_conv_inputs(CASE)))
    expected = np.asarray(op(*inputs))
    with ThreadPoolExecutor(8) as pool:
        for found in pool.map(lambda _: np.asarray(op(*inputs)), range(64)):
            np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_repeated_calls_are_bitwise_equal(backend, dtype):
    if backend == XLA_ON_GPU:
        pytest.skip("XLA promises that on a GPU only with xla_gpu_deterministic_ops")
    case = ConvCase(spatial=(28, 26), batch=4, features=16, out_features=32, padding="SAME")
    inputs = make_conv_inputs(case, dtype)
    op = conv(backend, **case.settings)
    dy = cotangent((4, 32, 28, 26), dtype)
    gradients = jax.jit(lambda inputs, dy: jax.vjp(op, *inputs)[1](dy))
    with config.override(deterministic=True):
        first, *others = (gradients(tuple(inputs), dy) for _ in range(5))
    for other in others:
        jax.tree.map(np.testing.assert_array_equal, other, first)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("serialized", [False, True])
@pytest.mark.parametrize("differentiated", ["before", "after"])
def test_export_round_trip(backend, transposed, serialized, differentiated):
    """A module is exported with its gradient, or differentiated after the import."""
    if serialized:
        pytest.importorskip("flatbuffers", reason="JAX serializes with flatbuffers")
    case = TransposeCase(strides=(2, 1)) if transposed else CASE
    op = (conv_transpose if transposed else conv)(backend, **case.settings)
    inputs = backend.put(tuple((make_transpose_inputs if transposed else make_conv_inputs)(case)))

    def loss(*inputs):
        return jnp.sum(jnp.sin(op(*inputs)))

    def with_gradients(function):
        return jax.value_and_grad(function, argnums=(0, 1, 2))

    function = jax.jit(with_gradients(loss) if differentiated == "before" else loss)
    shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in inputs]
    platforms = ["cuda" if backend.platform == "gpu" else "cpu"]
    exported = export.export(function, disabled_checks=jaxgrad.export_disabled_checks(), platforms=platforms)(*shapes)
    if serialized:
        exported = export.deserialize(exported.serialize(vjp_order=int(differentiated == "after")))
    restored = exported.call if differentiated == "before" else with_gradients(exported.call)
    found, expected = restored(*inputs), with_gradients(loss)(*inputs)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), found, expected)


def test_export_for_two_platforms_holds_both_implementations():
    case = ConvCase(spatial=(9, 11), window=(1, 1))  # runs on XLA on a GPU, in every build
    inputs = make_conv_inputs(case)
    call = jax.jit(conv(Backend(None, "cpu"), **case.settings))

    def module(*platforms):
        return export.export(call, disabled_checks=jaxgrad.export_disabled_checks(), platforms=platforms)(
            *inputs
        ).mlir_module()

    kernel, plain = "stablehlo.custom_call @jaxgrad_onednn_conv_forward", "stablehlo.convolution"
    both, cpu, gpu = module("cpu", "cuda"), module("cpu"), module("cuda")
    assert (kernel in both, kernel in cpu, kernel in gpu) == (True, True, False)
    assert (plain in both, plain in cpu, plain in gpu) == (True, False, True)


def _reach(case, operand, like):
    """Elements that depend on one element of an operand: in y, and in the gradient of the other operand."""
    ones = [np.ones_like(a) for a in like]
    marked = [np.zeros_like(a) for a in like]
    marked[operand].flat[7 % like[operand].size] = 1
    bias = [marked[2] if operand == 2 else np.zeros_like(like[2])]
    factors = marked[:2] if operand == 2 else [marked[i] if i == operand else ones[i] for i in range(2)]
    shape = jax.eval_shape(lax_conv(case), *like).shape
    reach = run(lax_conv(case), type(like)(*factors, *bias), np.ones(shape, np.float32))
    other = {0: "rhs", 1: "lhs"}.get(operand)
    nowhere = {name: np.zeros_like(getattr(reach, name)) for name in reach._fields if name not in ("y", other)}
    return reach._replace(**nowhere)


@pytest.mark.parametrize("value", thorough_after(2, [np.nan, np.inf, -np.inf]))
@pytest.mark.parametrize("operand", [0, 1, 2])
@pytest.mark.parametrize("groups", [1, 2])
def test_nan_and_infinity_propagate(backend, value, operand, groups):
    """A nonfinite element makes every sum over it nonfinite, and no element that is finite in `jax.lax`.

    `jax.lax` may also multiply it by the zeros between the elements of a strided gradient, which yields more NaN.
    cuDNN does so for nonfinite weights.
    """
    case = ConvCase(strides=(2, 1), padding=((0, 0), (0, 0)), groups=groups)
    drawn = make_conv_inputs(case)
    inputs = type(drawn)(*(np.abs(a) + np.float32(0.1) for a in drawn))
    inputs[operand].flat[7 % inputs[operand].size] = value
    dy = cotangent(jax.eval_shape(lax_conv(case), *inputs).shape, "float32")
    dy = np.abs(dy) + np.float32(0.1)  # all positive: no infinities of opposite sign are added
    found, plain = run(conv(backend, **case.settings), inputs, dy), run(lax_conv(case), inputs, dy)
    reach = _reach(case, operand, inputs)
    assert np.any(reach.y)
    for name in found._fields:
        actual, expected, met = (getattr(result, name) for result in (found, plain, reach))
        assert not np.isfinite(actual[met != 0]).any(), name
        good = np.isfinite(expected)
        assert not good[met != 0].any(), name
        if backend.implementation == "cudnn" and operand == 1 and name == "lhs":
            good &= np.isfinite(actual)
        np.testing.assert_allclose(actual[good], expected[good], rtol=1e-5, err_msg=name)
        if np.isinf(value):
            np.testing.assert_array_equal(actual[met != 0], value)


@pytest.mark.parametrize("layout", [None, ("NHWC", "HWIO", "NHWC")], ids=["first", "last"])
def test_debug_nans(backend, layout):
    """No NaN from uninitialized memory, such as unused results and the workspace."""
    case = CASE.replace(layout=layout)
    inputs = backend.put(tuple(make_conv_inputs(case)))
    op = conv(backend, **case.settings)
    with jax.debug_nans(True):
        for argnum in range(3):
            gradient = jax.jit(jax.grad(lambda *inputs: jnp.sum(jnp.sin(op(*inputs))), argnums=argnum))(*inputs)
            assert np.isfinite(gradient).all()


def test_repeated_calls_reuse_their_plan():
    op, inputs = jax.jit(conv(ONEDNN, **CASE.settings)), make_conv_inputs(CASE)
    op(*inputs).block_until_ready()
    before = jaxgrad.plan_cache_info()["onednn"]
    for _ in range(10):
        op(*inputs).block_until_ready()
    after = jaxgrad.plan_cache_info()["onednn"]
    assert after["hits"] - before["hits"] >= 10
    assert after["misses"] == before["misses"]


def _plan(size: int) -> None:
    """Requests a plan for a shape of that size from the compiled module, bypassing the cache in Python."""
    geometry = ConvGeometry((0, 1, 2), (0, 1, 2), (0, 1, 2), (1,), ((1, 1),), (1,), 1, (size,), (3,))
    onednn_plan.__wrapped__("forward", ConvProblem(geometry, 1, 8, 8, np.dtype("float32")), False)


def _resident_megabytes() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096 / 1e6


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="memory is read from /proc")
def test_plan_cache_is_bounded():
    """With ever new shapes the cache holds `capacity` plans, and memory does not grow further."""
    capacity = jaxgrad.plan_cache_info()["onednn"]["capacity"]
    for size in range(100, 100 + capacity):
        _plan(size)
    full, before = jaxgrad.plan_cache_info()["onednn"], _resident_megabytes()
    assert full["size"] == capacity
    for size in range(100 + capacity, 100 + 2 * capacity):
        _plan(size)
    after = jaxgrad.plan_cache_info()["onednn"]
    assert after["size"] == capacity
    assert after["misses"] - full["misses"] == capacity
    assert _resident_megabytes() - before < 0.1 * capacity  # 0.1 MB per plan would mean that no plan is freed
    for size in range(100 + 2 * capacity - 1, 100 + 2 * capacity - 9, -1):
        _plan(size)  # the most recent plans are still cached
    assert jaxgrad.plan_cache_info()["onednn"]["hits"] - after["hits"] == 8
    assert _cpu.conv_plan_cache_info() == jaxgrad.plan_cache_info()["onednn"]
