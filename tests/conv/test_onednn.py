"""Without a usable oneDNN: correct results on XLA, one warning, and an error for forced kernels."""

from __future__ import annotations

import shutil
import subprocess

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from thorough import one_in, thorough_after

import jaxgrad
from jaxgrad import _cpu
from jaxgrad._src.native import cpu

_PATCH = """
import importlib.metadata, pathlib, platform
real = importlib.metadata.files
library = {library!r}
if library == "AArch64":
    platform.machine = lambda: "aarch64"

class File:
    name = "libdnnl.so.3"
    def locate(self):
        return pathlib.Path(library)

def files(package):
    if package != "onednn-cpu-gomp":
        return real(package)
    if library in ("no package", "AArch64"):
        raise importlib.metadata.PackageNotFoundError(package)
    return None if library == "no list" else [] if library == "no file" else [File()]

importlib.metadata.files = files
"""

_SCRIPT = """
import warnings
import numpy as np
from conv_cases import ConvCase, make_conv_inputs
from conv_references import lax_conv
from conv_transpose_cases import TransposeCase, lax_conv_transpose, make_transpose_inputs
import jax, jaxgrad

reason = {reason!r}
jax.config.update("jax_platforms", "cpu")
case, transposed = ConvCase(groups=2, strides=(2, 1)), TransposeCase(strides=(2, 1), groups=2)
inputs, others = make_conv_inputs(case), make_transpose_inputs(transposed)

def conv(lhs, rhs, bias, **settings):
    return jaxgrad.conv_general_dilated(lhs, rhs, bias=bias, **case.settings, **settings)

def conv_transpose(lhs, rhs, bias, **settings):
    return jaxgrad.conv_transpose(lhs, rhs, bias=bias, **transposed.settings, **settings)

with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for settings in ({{"implementation": "xla"}}, {{}}, {{}}):
        pairs = [(conv, lax_conv(case), inputs), (conv_transpose, lax_conv_transpose(transposed), others)]
        for ours, plain, arrays in pairs:
            results = [
                (lambda y, pullback: (y, *pullback(y)))(*jax.vjp(op, *arrays))
                for op in (lambda *a: jax.jit(lambda *a: ours(*a, **settings))(*a), plain)
            ]
            for found, expected in zip(*results, strict=True):
                np.testing.assert_allclose(found, expected, rtol=0, atol=1e-3)
        if settings:
            assert not [w for w in caught if "jaxgrad" in str(w.message)], "a warning, though XLA was asked for"
found = [w for w in caught if "jaxgrad" in str(w.message)]
assert len(found) == 1, [str(w.message) for w in caught]
assert found[0].category is RuntimeWarning
assert reason in str(found[0].message) and "python -m jaxgrad" in str(found[0].message), found[0].message

for op, arrays in ((conv, inputs), (conv_transpose, others)):
    try:
        op(*arrays, implementation="onednn")
    except RuntimeError as error:
        assert ("jaxgrad.conv_general_dilated" if op is conv else "jaxgrad.conv_transpose") in str(error)
        assert reason in str(error), error
    else:
        raise SystemExit("implementation='onednn' ran without oneDNN")

choice = jaxgrad.explain(jaxgrad.conv_general_dilated, *inputs[:2], **case.settings, platform="cpu")
assert choice.implementation == "xla" and reason in choice.reason, choice

# What needs no oneDNN runs on its own kernels as ever.
assert jaxgrad.explain(jaxgrad.gru, platform="cpu").implementation == "cpu"
"""

_DIAGNOSIS = "import runpy; runpy.run_module('jaxgrad', run_name='__main__')"

_OPENMP = 2  # DNNL_RUNTIME_OMP

_VERSION = """
typedef struct { int major, minor, patch; const char *hash; unsigned cpu_runtime, gpu_runtime; } version_t;
static const version_t version = {MAJOR, MINOR, 9, "", RUNTIME, 0};
const version_t *dnnl_version(void) { return &version; }
"""


def _library(kind, folder):
    """A path or a keyword of the patch, and the expected reason."""
    path = folder / "libdnnl.so.3"
    if kind == "missing package":
        return "no package", "the package onednn-cpu-gomp is not installed"
    if kind == "AArch64":
        return kind, "the package onednn-cpu-gomp is not installed (it does not exist for aarch64)"
    if kind in ("no file", "no list"):
        return kind, "the package onednn-cpu-gomp has no libdnnl.so.3"
    if kind == "no library":
        path.write_text("this is not a library")
        return str(path), str(path)
    if kind == "deleted":
        return str(path), str(path)
    major, minor, runtime, reason = {
        "too old": (3, 1, _OPENMP, "is oneDNN 3.1; jaxgrad needs 3.2"),
        "much too old": (2, 7, _OPENMP, "is oneDNN 2.7; jaxgrad needs 3.2"),
        "too new": (4, 0, _OPENMP, "is oneDNN 4.0; jaxgrad needs 3.2"),
        "without functions": (3, 2, _OPENMP, "has no function dnnl_"),
        "SYCL": (3, 13, 512, "is built for the CPU runtime SYCL; jaxgrad needs OpenMP, TBB or a sequential build"),
        "thread pool": (3, 13, 8, "is built for the CPU runtime THREADPOOL"),
    }[kind]
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler")
    source = folder / "version.c"
    source.write_text(_VERSION)
    values = f"-DMAJOR={major}", f"-DMINOR={minor}", f"-DRUNTIME={runtime}"
    subprocess.run([compiler, "-shared", "-fPIC", *values, "-o", path, source], check=True)
    return str(path), reason


KINDS = ["missing package", "no file", "no list", "no library", "deleted", "too old", "much too old", "too new"]


@pytest.mark.parametrize("kind", one_in(3, [*KINDS, "without functions", "SYCL", "thread pool"]))
def test_diagnosis_reports_why_onednn_is_missing(kind, run_python, tmp_path):
    """The report of `python -m jaxgrad` has the reason and is complete."""
    library, reason = _library(kind, tmp_path)
    text = run_python(_PATCH.format(library=library) + _DIAGNOSIS, JAXGRAD_ONEDNN="package").stdout
    for part in (reason, "conv_general_dilated on cpu: 'xla'", "conv_transpose on cpu: 'xla'", "gru on cpu: 'cpu'"):
        assert part in text, f"{part!r} is not in:\n{text}"


@pytest.mark.parametrize("kind", thorough_after(1, ["AArch64", "no library", "too old"]))
def test_calls_run_on_xla_without_onednn(kind, run_python, tmp_path):
    library, reason = _library(kind, tmp_path)
    run_python(_PATCH.format(library=library) + _SCRIPT.format(reason=reason), JAXGRAD_ONEDNN="package")


def test_without_the_compiled_module(run_python):
    reason = "the compiled module cannot be loaded"
    script = _SCRIPT.format(reason=reason).split("# What needs no oneDNN")[0]
    run_python("import sys; sys.modules['jaxgrad._cpu'] = None\n" + script)


def test_a_library_that_cannot_be_loaded_does_not_replace_the_one_in_use(tmp_path):
    path = tmp_path / "libdnnl.so.3"
    path.write_text("this is not a library")
    assert not cpu.onednn_unavailable()
    _cpu.load_onednn(str(path))  # no effect: a library is already loaded
    plan = jaxgrad.plan_cache_info()["onednn"]
    assert plan["capacity"] > 0


def test_diagnosis_lists_the_onednn_handlers(run_python):
    text = run_python(_DIAGNOSIS).stdout
    parts = [f"jaxgrad_onednn_conv_{kind}" for kind in ("forward", "input_gradient", "weight_gradient")]
    parts += ["conv_general_dilated on cpu: 'onednn'", "conv_transpose on cpu: 'onednn'", jax.__version__]
    for part in parts:
        assert part in text, f"{part!r} is not in:\n{text}"


_STRIDED = """
import jax, jaxgrad, numpy as np
rng = np.random.default_rng(0)
for depth, window, stride, padding in ((6, 6, 2, (5, 4)), (5, 6, 3, (6, 2)), (6, 7, 3, (6, 6)), (4, 6, 2, (5, 6))):
    x, w = (rng.standard_normal(shape).astype("float32") for shape in ((1, 2, depth, 3, 4), (3, 2, window, 2, 3)))

    def gradient(conv, **settings):
        y, pullback = jax.vjp(lambda w: conv(x, w, (stride, 1, 1), (padding, (0, 1), (1, 0)), **settings), w)
        return pullback(np.cos(np.arange(y.size, dtype=y.dtype)).reshape(y.shape))[0]

    actual, expected = gradient(jaxgrad.conv_general_dilated), gradient(jax.lax.conv_general_dilated)
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-4)
    try:
        gradient(jaxgrad.conv_general_dilated, implementation="onednn")
    except ValueError as error:
        assert "window lies within the first spatial axis" in str(error)
    else:
        raise AssertionError("oneDNN runs")
"""


def test_strided_weight_gradients_without_a_window_inside_the_depth(run_python):
    """In three dimensions oneDNN 3.2 computes wrong values there, or writes past the end of the weight gradient."""
    run_python(_STRIDED, JAX_PLATFORMS="cpu", MALLOC_CHECK_="3")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("width", "window", "stride", "dilation", "padding"),
    [(3, 2, 3, 1, (0, 0)), (4, 3, 2, 1, (0, 0)), (6, 2, 5, 3, (0, 1)), (3, 4, 3, 1, (2, 1)), (2, 2, 2, 2, (0, 2))],
)
def test_strides_without_effect(width, window, stride, dilation, padding, dtype):
    """One output column of one input feature: oneDNN 3.7 and 3.12 need its stride to be one."""
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((3, 5, width, 8)), dtype)
    w = jnp.asarray(rng.standard_normal((3, window, 1, 16)), dtype)
    settings = {
        "window_strides": (1, stride),
        "padding": ((0, 0), padding),
        "rhs_dilation": (1, dilation),
        "dimension_numbers": ("NHWC", "HWIO", "NHWC"),
        "feature_group_count": 8,
    }
    found = jaxgrad.conv_general_dilated(x, w, implementation="onednn", **settings)
    expected = jax.lax.conv_general_dilated(x.astype("float32"), w.astype("float32"), **settings)
    assert found.shape[2] == 1
    np.testing.assert_allclose(found.astype("float32"), expected, rtol=0, atol=0.05 if dtype == "bfloat16" else 1e-5)


_CLEARED = """
import ctypes, gc
import jax, numpy as np, jaxgrad
from jaxgrad._src.native import cpu

class MallInfo(ctypes.Structure):
    _fields_ = [("others", ctypes.c_size_t * 7), ("used", ctypes.c_size_t), ("last", ctypes.c_size_t * 2)]

libc = ctypes.CDLL(None)
libc.mallinfo2.restype = MallInfo
library = ctypes.CDLL(cpu.find_onednn().library.path)
limit = ctypes.c_int()

def capacity():
    library.dnnl_get_primitive_cache_capacity(ctypes.byref(limit))
    return limit.value

x, w = np.ones((2, 16, 20, 20), np.float32), np.ones((16, 16, 3, 3), np.float32)
call = jax.jit(lambda x, w: jaxgrad.conv_general_dilated(x, w, (1, 1), "SAME")).lower(x, w).compile()
expected, before = call(x, w), capacity()
for n in range(200):  # plans alone, without programs
    shape = (2, 16, 20, 30 + n)
    jax.eval_shape(lambda x: jaxgrad.conv_general_dilated(x, w, (1, 1), "SAME"), jax.ShapeDtypeStruct(shape, "float32"))
assert jaxgrad.plan_cache_info()["onednn"]["size"] > 200
gc.collect()
used = libc.mallinfo2().used
cpu.module.clear_caches()
freed = used - libc.mallinfo2().used
assert freed > 200 * 10_000, freed
library.dnnl_set_primitive_cache_capacity(0)
more = used - freed - libc.mallinfo2().used
assert more < 200 * 100, more  # oneDNN keeps no primitives of them
library.dnnl_set_primitive_cache_capacity(before)
np.testing.assert_array_equal(call(x, w), expected)  # makes its plan anew
assert jaxgrad.plan_cache_info()["onednn"]["size"] > 0
jax.clear_caches()
assert jaxgrad.plan_cache_info()["onednn"]["size"] == 0
assert capacity() == before > 0
"""


def test_clearing_the_caches_of_jax_frees_plans(run_python):
    run_python(_CLEARED, JAX_PLATFORMS="cpu")
