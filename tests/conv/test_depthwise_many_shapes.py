"""2,000 depthwise convolutions in one process: similar sizes share a CUDA kernel, and memory does not grow."""

from __future__ import annotations

import json

import pytest
from cuda_module import NEEDS_CUDA_MODULE

pytestmark = [NEEDS_CUDA_MODULE, pytest.mark.thorough]

_SCRIPT = """
import ctypes, gc, json, random
import jax
import jax.numpy as jnp
from jaxgrad._src.conv.kernels import depthwise_cuda
from jaxgrad._src.conv.backend import PASSES
from jaxgrad._src.conv.call.geometry import ConvGeometry
from jaxgrad._src.conv.call.problem import ConvProblem
from jaxgrad._src.native import cuda

driver = ctypes.CDLL("libcuda.so.1")
LAYERS = [  # number of shapes, window, stride, dilation, dtype and channels
    (500, (31,), 1, 1, "float32", 96),
    (500, (4,), 1, 2, "bfloat16", 256),
    (500, (3,), 2, 1, "float16", 64),
    (220, (3, 3), 1, 2, "float16", 64),
    (220, (7, 7), 1, 1, "bfloat16", 96),
    (120, (3, 3, 3), 1, 1, "float32", 24),
]
LONGEST = {1: 2000, 2: 120, 3: 40}  # of an axis
PICTURES = (28, 28), (14, 14)  # of videos, whose numbers of frames are random

def shapes():
    "One pass of each call; the sizes are random."
    draw = random.Random(0)
    for count, window, stride, dilation, dtype, channels in LAYERS:
        n = len(window)
        last = 0, n + 1, *range(1, n + 1)
        padding = tuple((dilation * (k - 1) // 2,) * 2 for k in window)
        for i in range(count):
            fixed = PICTURES[i % 2] if n == 3 else ()
            spatial = *(draw.randint(8, LONGEST[n]) for _ in window[len(fixed):]), *fixed
            g = ConvGeometry(last, (n + 1, n, *range(n)), last, (stride,) * n, padding, (dilation,) * n, channels,
                             spatial, window)
            yield PASSES[i % 3], ConvProblem(g, draw.randint(1, 64), channels, channels, jnp.dtype(dtype))

def resident():
    "KiB of the process."
    gc.collect()
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmRSS"))

def compile_kernel(pass_name, problem):
    assert not depthwise_cuda.kernel_rejection(pass_name, problem)
    depthwise_cuda._compile(pass_name, problem, False)

def caches():
    return [cuda.module.depthwise_convolution_plan_cache_info(), cuda.module.depthwise_plan_cache_info()]

assert not cuda.nvrtc_unavailable()
"""


def test_similar_sizes_share_kernels(on_fake_cuda):
    """Videos share them where the pictures have one size. A plan of the caches keeps its kernel loaded."""
    found = on_fake_cuda(f"""
import fake_gpu
{_SCRIPT}
compilations, memory = {{n: 0 for n in LONGEST}}, []
for i, (pass_name, problem) in enumerate(shapes()):
    before = driver.fake_compilations()
    compile_kernel(pass_name, problem)
    compilations[len(problem.geometry.x_spatial)] += driver.fake_compilations() - before
    if i % 1000 == 999:
        memory.append(resident())
print(json.dumps(dict(compilations=compilations, memory=memory, modules=driver.fake_modules(), caches=caches())))
""")
    for cache in found["caches"]:
        assert cache["misses"] > cache["size"] == cache["capacity"]
    assert found["compilations"]["1"] < 300  # of 1500
    assert found["compilations"]["2"] < 260  # of 440
    assert found["compilations"]["3"] < 60  # of 120
    assert found["modules"] < 500
    middle, end = found["memory"]
    assert (end - middle) / 1000 < 4


@pytest.mark.parametrize("platform", ["fake", pytest.param("gpu", marks=pytest.mark.gpu)])
def test_memory_does_not_grow_with_the_shapes(platform, on_fake_cuda, run_python, tmp_path):
    """Each round of the same calls evicts the kernels of the round before. Later rounds load them from the disk."""
    script = f"""
{"import fake_gpu" if platform == "fake" else ""}
{_SCRIPT}
def on_device():
    "The loaded modules of the fake driver, or KiB of the GPU, whose memory other processes may change."
    if {platform == "fake"}:
        return driver.fake_modules()
    context, free, total = ctypes.c_void_p(), ctypes.c_size_t(), ctypes.c_size_t()
    assert driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
    assert driver.cuCtxSetCurrent(context) == 0
    assert driver.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total)) == 0
    return (total.value - free.value) // 1024

jax.block_until_ready(jnp.ones(3))  # JAX has its context on the GPU
found = []
for _ in range(3):
    for pass_name, problem in shapes():
        compile_kernel(pass_name, problem)
    depthwise_cuda._compile.cache_clear()
    found.append([resident(), on_device()])
print(json.dumps([found, caches()]))
"""
    environment = {"JAXGRAD_PLAN_CACHE_DIR": str(tmp_path)}
    if platform == "fake":
        memory, caches = on_fake_cuda(script, **environment)
    else:
        done = run_python(script, seconds=900, **environment, XLA_PYTHON_CLIENT_PREALLOCATE="false")
        memory, caches = json.loads(done.stdout.splitlines()[-1])
    print(memory, caches)
    for cache in caches:
        assert cache["misses"] >= 3 * 660
        assert cache["size"] == cache["capacity"]
    (host, device), *_, (host_at_end, device_at_end) = memory
    assert host_at_end - host < 8192
    assert device_at_end - device <= (0 if platform == "fake" else 8192)  # a kernel takes some tens of KiB
