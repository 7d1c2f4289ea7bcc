"""Exported programs on machines that differ from the one they were exported on.

Threads, instruction sets and oneDNN are known when a program runs, not when it is exported.
"""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.jax_version

_OPS = """
import sys, warnings
import jax, jax.numpy as jnp, numpy as np
import jaxgrad

random = np.random.default_rng(0)

def draw(*shape, dtype="float32"):
    return jnp.asarray(random.standard_normal(shape), dtype)

def conv(x, w, b):
    return jaxgrad.conv_general_dilated(x, w, (1, 1), "SAME", bias=b, implementation="onednn")

def conv_last(x, w, b):
    layout = ("NHWC", "HWIO", "NHWC")
    return jaxgrad.conv_general_dilated(
        x, w, (1, 1), "SAME", bias=b, dimension_numbers=layout, implementation="onednn")

def gru(x, w, r):
    return jaxgrad.gru(x, w, r, implementation="cpu")

def batch_norm(x, scale, bias):
    return jaxgrad.batch_norm_training(x, scale, bias, implementation="cpu")

def max_pool(x):
    return jaxgrad.max_pool(x, (3, 2), (2, 1), "SAME", implementation="cpu")

def max_pool_first(x):
    return jaxgrad.max_pool(x, (3, 2), (2, 1), "SAME", feature_axis=1, implementation="cpu")

def avg_pool(x):
    return jaxgrad.avg_pool(x, (3, 2), (2, 1), "SAME", False, implementation="cpu")

OPS = {
    "conv": (conv, (draw(4, 16, 28, 28), draw(32, 16, 3, 3), draw(32))),
    "conv_bfloat16": (conv, tuple(draw(*s, dtype="bfloat16") for s in ((4, 16, 28, 28), (32, 16, 3, 3), (32,)))),
    "vmapped_conv": (jax.vmap(conv), (draw(6, 2, 16, 28, 28), draw(6, 32, 16, 3, 3), draw(6, 32))),
    "vmapped_conv_last": (jax.vmap(conv_last), (draw(3, 2, 29, 30, 17), draw(3, 3, 3, 17, 33), draw(3, 33))),
    "conv_1x1": (conv, (draw(8, 64, 28, 28), draw(48, 64, 1, 1), draw(48))),
    "gru": (gru, (draw(9, 33, 20), draw(1, 150, 20), draw(1, 150, 50))),
    "gru_of_groups": (jax.vmap(gru), (draw(3, 9, 5, 20), draw(3, 1, 150, 20), draw(3, 1, 150, 50))),
    "gru_of_examples": (jax.vmap(gru, (0, None, None)), (draw(3, 9, 5, 20), draw(1, 150, 20), draw(1, 150, 50))),
    "batch_norm": (batch_norm, (draw(16, 29, 29, 24), draw(24), draw(24))),
    "max_pool": (max_pool, (draw(16, 29, 31, 24),)),
    "avg_pool": (avg_pool, (draw(16, 29, 31, 24),)),
    "max_pool_first": (max_pool_first, (draw(8, 24, 29, 31),)),
}

def values_and_gradients(op, arguments):
    values, pullback = jax.vjp(op, *arguments)
    return values, pullback(jax.tree.map(lambda value: value**2, values))
"""

_EXPORT = (
    _OPS
    + """
from jax import export
for name, (op, arguments) in OPS.items():
    function = jax.jit(lambda *arguments: values_and_gradients(op, arguments))
    checks = jaxgrad.export_disabled_checks()
    exported = export.export(function, disabled_checks=checks, platforms=["cpu"])(*arguments)
    with open(f"{FOLDER}/{name}", "wb") as file:
        file.write(exported.serialize())
"""
)

_RUN = (
    _OPS
    + """
from jax import export
for name, (op, arguments) in OPS.items():
    with open(f"{FOLDER}/{name}", "rb") as file:
        found = export.deserialize(bytearray(file.read())).call(*arguments)
    widened = [argument.astype("float32") for argument in arguments]
    expected = values_and_gradients(op, widened)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        tolerance = 3e-2 if "bfloat16" in name else 1e-5
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * np.abs(b).max(), err_msg=name)
"""
)

_NARROW = {"OMP_NUM_THREADS": "1", "ONEDNN_MAX_CPU_ISA": "AVX2", "JAXGRAD_CPU_ISA": "baseline"}
_WIDE = {"OMP_NUM_THREADS": "5"}


@pytest.fixture(scope="module")
def exported(run_python, tmp_path_factory):
    """Folders of programs, exported with few and with many threads and instruction sets."""
    pytest.importorskip("flatbuffers", reason="JAX serializes with flatbuffers")
    folders = {name: tmp_path_factory.mktemp(name) for name in ("narrow", "wide")}
    for name, environment in (("narrow", _NARROW), ("wide", _WIDE)):
        run_python(f"FOLDER = {str(folders[name])!r}\n{_EXPORT}", JAX_PLATFORMS="cpu", **environment)
    return folders


@pytest.mark.parametrize(("lowered", "environment"), [("narrow", _WIDE), ("wide", _NARROW)])
def test_programs_run_with_other_threads_and_instruction_sets(exported, lowered, environment, run_python):
    run_python(f"FOLDER = {str(exported[lowered])!r}\n{_RUN}", JAX_PLATFORMS="cpu", **environment)


_WITHOUT_ONEDNN = """
import importlib.metadata
real = importlib.metadata.files

def files(package):
    if package == "onednn-cpu-gomp":
        raise importlib.metadata.PackageNotFoundError(package)
    return real(package)

importlib.metadata.files = files
"""

_ERRORS = (
    _OPS
    + """
from jax import export
from jaxgrad import _cpu

def missing_library(name):
    op, arguments = OPS[name]
    with open(f"{FOLDER}/{name}", "rb") as file:
        program = export.deserialize(bytearray(file.read()))
    try:
        jax.block_until_ready(program.call(*arguments))
    except jax.errors.JaxRuntimeError as error:
        return "FAILED_PRECONDITION" in str(error) and "libdnnl.so.3" in str(error) and "onednn-cpu-gomp" in str(error)
    return False

assert [name for name in OPS if missing_library(name)] == [name for name in OPS if "conv" in name]

layout = dict(lhs_spec=(0, 1, 2), rhs_spec=(0, 1, 2), out_spec=(0, 1, 2), window_strides=(1,), padding=(0, 0),
              rhs_dilation=(1,), feature_group_count=1)
try:
    _cpu.conv_plan(0, False, False, [(1, 2, 5), (3, 2, 3), (1, 3, 3)], layout)
except RuntimeError as error:
    assert "oneDNN" in str(error)
else:
    raise AssertionError("a plan without oneDNN")
"""
)


def test_programs_without_onednn_are_errors(exported, run_python):
    """The convolutions name what is missing; the other ops need no oneDNN."""
    run_python(
        f"FOLDER = {str(exported['wide'])!r}\n{_WITHOUT_ONEDNN}{_ERRORS}", JAX_PLATFORMS="cpu", JAXGRAD_ONEDNN="package"
    )
