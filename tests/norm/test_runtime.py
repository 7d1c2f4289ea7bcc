"""Threads, strict settings of JAX, and the instruction sets of the CPU kernels."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import pytest
from backends import BATCH_NORM
from batch_norm_references import (
    Case,
    make_inputs,
    training,
    values_and_gradients,
)

BACKENDS = BATCH_NORM


def test_many_threads_at_once(backend):
    """Eight concurrent calls that share the thread pool: each result is bitwise equal to that of a lone call."""
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
from norm_cases import NormCase, make_inputs as make_norm_inputs
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
            norm = NormCase("rms_norm", (5, 4, 3), activation="gelu", dtypes=dtypes[:2], given=("scale", "residual"))
            for norm in (norm, norm.replace(op="group_norm", num_groups=3), norm.replace(op="layer_norm")):
                arrays, dy = make_norm_inputs(norm)
                values_and_gradients(lambda *a: (norm.call("xla")(*a),), arrays, (dy,))
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
