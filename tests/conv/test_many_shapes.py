"""Thousands of shapes in one process: plans and kernels are evicted, and memory does not grow with their number."""

from __future__ import annotations

import json

import pytest

_SCRIPT = """
import ctypes, gc, itertools, json, random
import jax, jax.numpy as jnp
import jaxgrad

jaxgrad.config.update(search="heuristic")  # an exhaustive search takes up to a second for each shape
platform, count, parts = {platform!r}, {count}, 6
device = jax.devices(platform)[0]

def resident():
    "MiB of the process, and of the GPU, whose memory other processes may change."
    with open("/proc/self/status") as status:
        host = next(int(line.split()[1]) for line in status if line.startswith("VmRSS")) / 1024
    if platform == "cpu":
        return [host]
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    assert ctypes.CDLL("libcuda.so.1").cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total)) == 0
    return [host, (total.value - free.value) / 2**20]

def shapes():
    "Calls of jaxgrad's kernels: grouped and depthwise ones, with strides, in two dtypes; no two are alike."
    draw, seen = random.Random(0), set()
    while True:
        groups = draw.choice((1, 1, 2, 4, 24))
        features = [24, 24] if groups == 24 else [groups * draw.randint(2, 16) for _ in range(2)]
        window = draw.randint(2, 5)
        shape = draw.randint(1, 6), *(draw.randint(window, 24) for _ in range(2)), *features, groups, window
        shape += draw.choice((1, 2)), draw.choice(("float32", "bfloat16"))
        if shape not in seen:
            seen.add(shape)
            yield shape

def run(batch, height, width, features, out_features, groups, window, stride, dtype):
    x = jnp.ones((batch, height, width, features), dtype, device=device)
    w = jnp.ones((window, window, features // groups, out_features), dtype, device=device)
    def loss(x, w):
        y = jaxgrad.conv_general_dilated(
            x, w, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"), feature_group_count=groups)
        return y.astype("float32").sum()
    jax.block_until_ready(jax.jit(jax.grad(loss, (0, 1)))(x, w))

found = []
calls = shapes()
for _ in range(parts):
    for shape in itertools.islice(calls, count // parts):
        run(*shape)
    jax.clear_caches()
    gc.collect()
    found.append(resident())
print(json.dumps([found, jaxgrad.plan_cache_info()]))
"""


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("platform", "count"),
    [("cpu", 900), pytest.param("gpu", 720, marks=pytest.mark.gpu)],
)
def test_memory_does_not_grow_with_the_shapes(run_python, platform, count):
    """By less than 20 KiB for each shape: with `jax.lax` it is some 7.

    oneDNN before 3.4 never frees its matrix kernels (https://github.com/uxlfoundation/oneDNN/pull/1757); with SSE4.1 it
    has none.
    """
    environment = {"ONEDNN_MAX_CPU_ISA": "SSE41"}
    if platform == "gpu":
        environment = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
        environment["XLA_FLAGS"] = "--xla_gpu_autotune_level=0"  # compiles in less time
    done = run_python(_SCRIPT.format(platform=platform, count=count), **environment)
    memory, plans = json.loads(done.stdout.splitlines()[-1])
    print(memory, plans)
    info = plans["cpu" if platform == "cpu" else "cudnn"]
    if not info["misses"] > info["capacity"] >= info["size"]:
        pytest.fail("no plans were evicted")
    for series in zip(*memory, strict=True):
        assert (series[-1] - series[2]) * 1024 / (count / 2) < 20
