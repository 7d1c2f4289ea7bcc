"""cuDNN in fresh processes: plans stored on disk, exported programs, a full GPU, a missing cuDNN."""

from __future__ import annotations

import json
import os

import pytest

from jaxgrad._src.native import cuda

pytestmark = pytest.mark.gpu
fills_the_gpu = pytest.mark.skipif(
    int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")) > 1,
    reason="takes all memory of the GPU, which other tests need at the same time: run it with -n 0",
)

_PRELUDE = """
import ctypes, json, warnings
import jax, jax.numpy as jnp, numpy as np
from jax import export, lax
import jaxgrad
from conv_running import PASSES

jax.config.update("jax_default_matmul_precision", "highest")
jaxgrad.config.update(search="exhaustive")
SETTINGS = {"window_strides": (1, 2, 1), "padding": "SAME", "dimension_numbers": ("NDHWC", "DHWIO", "NDHWC")}
rng = np.random.default_rng(0)
X, W = (rng.standard_normal(shape).astype(np.float32) / 9 for shape in ((2, 12, 13, 14, 16), (3, 3, 3, 16, 24)))

def plain(x, w):
    return lax.conv_general_dilated(x, w, **SETTINGS)

def ours(x, w, implementation="cudnn"):
    return jaxgrad.conv_general_dilated(x, w, **SETTINGS, implementation=implementation)

def step(op):
    return jax.jit(jax.value_and_grad(lambda x, w: jnp.sum(jnp.sin(op(x, w))), argnums=(0, 1)))

def error(found, x=X, w=W):
    "The largest of the gradients', to their largest value."
    pairs = zip(found[1], step(plain)(x, w)[1], strict=True)
    return max(float(jnp.abs(a - b).max() / jnp.abs(b).max()) for a, b in pairs)

def counts():
    info = jaxgrad.plan_cache_info()["cudnn"]
    return [info["disk_hits"], info["disk_misses"]]

def report(**found):
    print(json.dumps(found))
"""


@pytest.fixture
def run(run_python):
    def run(script, **environment):
        memory = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
        return json.loads(run_python(_PRELUDE + script, **memory, **environment).stdout.splitlines()[-1])

    return run


_KEEP = """
import time
_ = step(plain)(X, W), jaxgrad.conv_general_dilated(X[:, :4], W, **SETTINGS, implementation="cudnn")
start = time.perf_counter()
lowered = step(ours).lower(X, W)
seconds = time.perf_counter() - start
before = counts()
found = error(lowered.compile()(X, W))
report(text=lowered.as_text(), error=found, counts=counts(), seconds=seconds)
"""


def test_plans_stored_on_disk(run, tmp_path):
    """The same program and correct gradients; candidates are timed once."""
    alone = run(_KEEP)
    first, second = (run(_KEEP, JAXGRAD_PLAN_CACHE_DIR=str(tmp_path)) for _ in range(2))
    print([found["seconds"] for found in (alone, first, second)])
    assert alone["text"] == first["text"] == second["text"]
    assert max(found["error"] for found in (alone, first, second)) < 1e-4
    assert alone["counts"] == [0, 0]
    # Two shapes; the warm-up shape has plans for its three passes too.
    assert first["counts"] == [0, 6]
    assert second["counts"] == [6, 0]
    assert len(list(tmp_path.glob("*.plan"))) == len(list(tmp_path.glob("*.checks"))) == 6


def test_a_program_exported_from_another_process(run, tmp_path):
    """It runs in a process that traces no jaxgrad call, with the stored plans and the cuDNN that XLA loaded."""
    program = tmp_path / "program"
    export = f"""
checks = [export.DisabledSafetyCheck.custom_call(f"jaxgrad_cudnn_conv_{{kind}}") for kind in PASSES]
program = export.export(step(ours), disabled_checks=checks, platforms=["cuda"])(X, W)
open({str(program)!r}, "wb").write(program.serialize())
report(counts=counts())
"""
    use = f"""
program = export.deserialize(open({str(program)!r}, "rb").read())
found = jax.jit(program.call)(X, W)
report(error=error(found), counts=counts(), size=jaxgrad.plan_cache_info()["cudnn"]["size"])
"""
    kept = {"JAXGRAD_PLAN_CACHE_DIR": str(tmp_path / "plans")}
    assert run(export, **kept)["counts"] == [0, 3]
    found = run(use, **kept)
    assert found["error"] < 1e-4
    assert found["counts"] == [3, 0]
    alone = run(use)
    assert alone["error"] < 1e-4
    assert alone["counts"] == [0, 0]
    assert alone["size"] == found["size"] == 3


# JAX keeps enough memory for the programs; `fill` allocates the rest of the GPU except `left` MiB.
_FILL = """
def fill(left):
    cuda = ctypes.CDLL("libcuda.so.1")
    context, free, total = ctypes.c_void_p(), ctypes.c_size_t(), ctypes.c_size_t()
    cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0)
    cuda.cuCtxPushCurrent_v2(context)
    size = 1 << 36
    while size >= 1 << 20:
        cuda.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total))
        block = ctypes.c_void_p()
        fits = free.value >= (left << 20) + size
        if not fits or cuda.cuMemAlloc_v2(ctypes.byref(block), ctypes.c_size_t(size)) != 0:
            size >>= 1
    return free.value >> 20

pool = jax.block_until_ready(jnp.zeros(1 << 29))
X, W = (rng.standard_normal(shape).astype(np.float32) / 9 for shape in ((4, 24, 24, 24, 32), (3, 3, 3, 32, 64)))
x, w = map(jax.device_put, (X, W))
expected = jax.block_until_ready(step(plain)(x, w))
pool.delete()
"""


@fills_the_gpu
@pytest.mark.parametrize("search", ["exhaustive", "heuristic"])
def test_little_memory(run, search):
    """Enough memory for cuDNN and none for timing: another choice, the same program, correct gradients."""
    script = f"""
jaxgrad.config.update(search={search!r})
{_FILL}
free = fill(24)
lowered = step(ours).lower(x, w)
found = lowered.compile()(x, w)
report(free=free, text=lowered.as_text(), error=error(found, x, w))
"""
    found = run(script)
    typical = run(script.replace("fill(24)", "0"))
    assert found["free"] < 32
    assert found["error"] < 1e-4
    assert found["text"] == typical["text"]


@fills_the_gpu
def test_a_full_gpu(run):
    """No memory even for cuDNN: calls run on XLA with one warning that has the reason; forced calls raise."""
    found = run(f"""
{_FILL}
free = fill(6)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    found = [step(lambda x, w: ours(x, w, None))(x, w) for _ in range(2)]
try:
    ours(x, w)
    forced = ""
except RuntimeError as error_:
    forced = str(error_)
warned = [str(w.message) for w in caught if w.category is RuntimeWarning]
report(free=free, warned=warned, forced=forced, error=error(found[0], x, w))
""")
    assert found["free"] < 16
    assert found["error"] < 1e-4
    (warned,) = found["warned"]
    assert warned.startswith("jaxgrad runs on XLA because the cuDNN kernels are missing: the GPU's memory is full")
    assert "implementation='cudnn' cannot run" in found["forced"]
    assert "the GPU's memory is full" in found["forced"]


def test_missing_cudnn(run):
    found = run("""
from jaxgrad._src.native import cuda

class Module:
    def __getattr__(self, name):
        return getattr(module, name)
    def load_cudnn(self, paths):
        raise RuntimeError("cuDNN cannot be opened: libcudnn.so.9: not there")

module, cuda.module = cuda.module, Module()
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    found = [step(lambda x, w: ours(x, w, None))(X, W) for _ in range(2)]
try:
    ours(X, W)
    forced = ""
except RuntimeError as error_:
    forced = str(error_)
report(warned=[str(w.message) for w in caught if w.category is RuntimeWarning], forced=forced, error=error(found[0]))
""")
    (warned,) = found["warned"]
    assert warned.startswith("jaxgrad runs on XLA because the cuDNN kernels are missing: cuDNN cannot be opened")
    assert "implementation='cudnn' cannot run: the cuDNN kernels are missing: cuDNN cannot be opened" in found["forced"]
    assert found["error"] < 1e-4


_LARGE = """
settings = {**SETTINGS, "window_strides": (1, 1, 1), "precision": lax.Precision.DEFAULT}
w = jnp.zeros((3, 3, 3, 32, 64))
# x is constant over space, so that the center of the window reads all of dy.
rows = rng.standard_normal((2, 32)).astype(np.float32)
x = jnp.broadcast_to(rows[:, None, None, None, :], (2, 64, 64, 64, 32)) + 0
dy = rng.standard_normal((2, 64, 64, 64, 64)).astype(np.float32)
expected = rows.T @ dy.astype(np.float64).sum((1, 2, 3))
dy = jax.device_put(dy)

def weights(x, w, dy):
    op = lambda w: jaxgrad.conv_general_dilated(x, w, **settings, implementation="cudnn")
    return jax.vjp(op, w)[1](dy)[0]

def outcome(**changes):
    jax.clear_caches()
    try:
        with jaxgrad.config.override(search="heuristic", **changes):
            found = np.asarray(jax.jit(weights)(x, w, dy))
    except jax.errors.JaxRuntimeError as error:
        return str(error)
    return float(np.abs(found[1, 1, 1] - expected).max() / np.abs(expected).max())

report(typical=outcome(), lean=outcome(workspace_limit=0))
"""


def test_a_workspace_that_does_not_fit(run_python):
    """XLA raises RESOURCE_EXHAUSTED; `workspace_limit` avoids the error."""
    megabytes = 340 << 20  # x and dy take 201 MB, the workspace of the first plan 211 MB
    fraction = megabytes / cuda.module.total_memory(0)
    environment = {"XLA_PYTHON_CLIENT_PREALLOCATE": "true", "XLA_PYTHON_CLIENT_MEM_FRACTION": f"{fraction:.6f}"}
    found = json.loads(run_python(_PRELUDE + _LARGE, **environment).stdout.splitlines()[-1])
    assert "RESOURCE_EXHAUSTED" in str(found["typical"]), found
    assert found["lean"] < 1e-2
