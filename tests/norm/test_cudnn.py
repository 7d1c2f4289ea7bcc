"""Batch normalization on cuDNN: random layouts and fused operations, command buffers, lowering without a GPU."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from backends import CUDNN, Backend
from batch_norm_references import Case, check_training, make_inputs, plain_training, training, values_and_gradients

pytestmark = pytest.mark.gpu

DEFAULT_ON_GPU = Backend(None, "gpu")
DTYPES = (*((x, "float32", "float32") for x in ("float32", "bfloat16", "float16")), ("float64",) * 3)


def _random_case(seed):
    rng = np.random.default_rng(seed)
    rank = int(rng.integers(2, 6))
    shape = tuple(int(n) for n in rng.integers(1, 13, rank))
    axis = -1 if seed % 2 else int(rng.integers(0, rank))
    relu = rng.random() < 0.6
    return Case(shape, axis, bool(rng.random() < 0.5), "relu" if relu else None, DTYPES[seed % 4], seed)


@pytest.mark.parametrize("seed", range(60))
def test_random_cases(seed):
    case = _random_case(seed)
    if case.terms < 2:
        pytest.skip("one element a channel, of which the other tests say what comes")
    check_training(CUDNN, case)
    if seed % 4 == 0:
        check_training(DEFAULT_ON_GPU, case)


@pytest.mark.parametrize("shape", [(400, 30, 30, 8), (300000, 4), (2, 3, 3000), (64, 56, 56, 64)], ids=str)
@pytest.mark.parametrize("dtypes", DTYPES, ids=lambda d: d[0])
def test_many_rows(shape, dtypes):
    """Enough rows to fill the device, and more than a launch has blocks in its second and third dimension."""
    check_training(CUDNN, Case(shape, -1, True, "relu", dtypes))


def test_repeated_calls_are_bitwise_equal():
    for dtypes in DTYPES[:3]:
        for shape in ((64, 28, 28, 64), (8, 14, 14, 256), (32, 8, 8, 16)):
            inputs, cotangents = jax.device_put(make_inputs(Case(shape, dtypes=dtypes)))
            first = values_and_gradients(training(CUDNN), inputs[:3], cotangents)
            for _ in range(10):
                jax.tree.map(
                    np.testing.assert_array_equal, values_and_gradients(training(CUDNN), inputs[:3], cotangents), first
                )


def test_recorded_into_a_command_buffer():
    """Twenty layers and their gradients in one program, run a hundred times with new inputs."""
    scales = [1 + 0.1 * np.cos(np.arange(16, dtype=np.float32) + i) for i in range(20)]

    def step(op, x, scales):
        def loss(scales):
            y = x
            for i, scale in enumerate(scales):
                residual = y if i % 3 == 0 else None
                y = y + 0.3 * op(y, scale, 0.1 * scale, residual=residual, activation="relu" if i % 2 else None).y
            return jnp.sum(y * jnp.sin(x))

        return jax.value_and_grad(loss)(scales)

    def plain(*args, **settings):
        return plain_training(*args, **settings, feature_axis=-1)

    shape = (4, 9, 9, 16)
    text = jax.jit(lambda x, s: step(training(CUDNN), x, s)).lower(np.zeros(shape, np.float32), scales)
    compiled = text.compile()
    expected = jax.jit(lambda x, s: step(plain, x, s))
    rng = np.random.default_rng(0)
    for _ in range(100):
        x = jax.device_put(rng.standard_normal(shape).astype(np.float32))
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=2e-3 * max(1, float(jnp.abs(b).max()))),
            compiled(x, scales),
            expected(x, scales),
        )


_LOWERED_ELSEWHERE = """
import jax, jax.numpy as jnp, numpy as np
from jax import export
import jaxgrad
from jaxgrad._src.native import cuda

assert not cuda.cudnn_unavailable()
cuda.gpu_ordinal = lambda: None  # as on a machine without a GPU: the workspace is a guess
names = [f"jaxgrad_cudnn_batch_norm_{kind}" for kind in ("forward", "backward")]
checks = [export.DisabledSafetyCheck.custom_call(name) for name in names]
rng = np.random.default_rng(0)
for shape in ((3, 4), (300000, 2), (50, 40, 40, 8), (64, 2048), (16, 28, 28, 512)):
    for dtype in ("float32", "bfloat16"):
        for residual in (False, True):
            def gradients(implementation, x, scale):
                def loss(x, scale):
                    y, _, _ = jaxgrad.batch_norm_training(x, scale, scale, residual=x if residual else None,
                                                          activation="relu", implementation=implementation)
                    return jnp.sum(jnp.sin(y.astype(jnp.float32)))
                return jax.grad(loss, (0, 1))(x, scale)
            x, scale = rng.standard_normal(shape).astype(dtype), np.linspace(0.5, 1, shape[-1], dtype=np.float32)
            ours = jax.jit(lambda x, scale: gradients("cudnn", x, scale))
            exported = export.export(ours, disabled_checks=checks, platforms=["cuda"])(x, scale)
            found, expected = jax.jit(exported.call)(x, scale), jax.jit(lambda *a: gradients("xla", *a))(x, scale)
            for a, b in zip(found, expected):
                a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
                # For relu of a sum, rounding decides the mask of some elements; a wrong call differs by 1.
                limit = (0.1 if residual else 0.02) * np.linalg.norm(b)
                assert np.linalg.norm(a - b) <= limit, (shape, dtype, residual)
"""


def test_a_program_lowered_without_a_gpu_runs(run_python):
    """The estimate of the workspace suffices."""
    run_python(_LOWERED_ELSEWHERE)
