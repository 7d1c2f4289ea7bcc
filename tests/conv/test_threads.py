"""Calls large enough for several threads: parts of the batch, or a team of oneDNN threads, from one thread and many."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from backends import ONEDNN, XLA
from conv_cases import ConvCase, cotangent, make_conv_inputs
from conv_references import lax_conv
from conv_running import assert_same, conv, run, terms
from thorough import one_in, thorough_after

# More than four million multiplications each; one case for each kind of kernel and layout. Two threads compute parts of
# the batch, of one or two images each, and a single image as a team.
LARGE = {
    "channels last": ConvCase(
        batch=4, spatial=(23, 21), features=40, out_features=48, window=(3, 2), layout=("NHWC", "HWIO", "NHWC")
    ),
    "features first": ConvCase(batch=4, spatial=(23, 21), features=40, out_features=48, window=(3, 2), strides=(1, 2)),
    "pointwise": ConvCase(batch=5, spatial=(33, 31), features=40, out_features=24, window=(1, 1), padding="VALID"),
    "one feature": ConvCase(batch=6, spatial=(61, 53), features=1, out_features=32, window=(3, 5), padding="SAME"),
    "one image": ConvCase(batch=1, spatial=(39, 35), features=40, out_features=48, window=(3, 2), strides=(2, 1)),
    "parts of two images": ConvCase(
        batch=8,
        spatial=(301,),
        features=24,
        out_features=40,
        window=(4,),
        rhs_dilation=(7,),
        layout=("NWC", "WIO", "NWC"),
    ),
    "groups": ConvCase(batch=7, spatial=(25, 22), features=8, out_features=24, groups=5, window=(3, 2), padding="SAME"),
    "depthwise": ConvCase(
        batch=9, spatial=(53, 51), features=4, out_features=4, groups=4, window=(7, 7), padding="SAME"
    ),
}


@pytest.mark.parametrize("name", one_in(2, LARGE))
def test_values_and_gradients(name):
    case = LARGE[name]
    inputs = make_conv_inputs(case)
    dy = cotangent(jax.eval_shape(lax_conv(case), *inputs).shape, "float32")
    found = run(conv(ONEDNN, **case.settings), inputs, dy)
    # Not jax.lax, whose weight gradient of groups takes minutes.
    exact = run(
        conv(XLA, **case.settings), type(inputs)(*(a.astype(np.float64) for a in inputs)), dy.astype(np.float64)
    )
    assert_same(found, exact, dtype="float32", terms=terms(inputs, dy), message=name)


_SCRIPT = """
import os, threading
from concurrent.futures import ThreadPoolExecutor
import jax, numpy as np
import jaxgrad

def call(size):
    x = np.random.default_rng(size).standard_normal((1, 2 * size, 30, 32)).astype(np.float32)
    w = np.random.default_rng(1).standard_normal((3, 3, 32, 32)).astype(np.float32)
    op = lambda implementation: jaxgrad.conv_general_dilated(
        x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"), implementation=implementation)
    expected = np.asarray(op("xla"))
    for _ in range(5):
        np.testing.assert_allclose(op("onednn"), expected, rtol=0, atol=1e-3)

call(29)
before = len(os.listdir("/proc/self/task"))
with ThreadPoolExecutor(8) as pool:
    list(pool.map(call, range(30, 62)))
print(len(os.listdir("/proc/self/task")) - before)
"""


@pytest.mark.parametrize("team", thorough_after(1, [12, 2, 40]))
def test_thread_count_stays_bounded(run_python, team):
    """If each of eight threads led a team of 40, there would be 320 threads."""
    extra = int(run_python(_SCRIPT, OMP_NUM_THREADS=str(team)).stdout)
    assert extra <= 8 + 16 + team  # the pool, the teams of callers, and one shared team


_PARTS = """
import os
import jax, jax.numpy as jnp, numpy as np
import jaxgrad

jax.config.update("jax_enable_x64", True)
LAYOUT = {"first": ("NCH", "OIH", "NCH"), "last": ("NHC", "HIO", "NHC")}
# Layout, shapes of x (batch, features, size) and w (out, in, window), stride, padding, dilation, independent problems.
CASES = {
    "ten images": ("last", (10, 48, 131), (40, 48, 5), 1, (3, 1), 2, 0),
    "strides": ("first", (15, 40, 233), (56, 40, 4), 3, (0, 5), 1, 0),
    "three problems": ("last", (6, 48, 141), (24, 48, 5), 1, (7, 0), 2, 3),
    "many weights": ("first", (10, 320, 7), (240, 320, 5), 1, (2, 2), 1, 0),
}

def gradients(implementation, numbers, stride, padding, dilation, x, w, bias, dy):
    def conv(x, w, bias):
        return jaxgrad.conv_general_dilated(x, w, (stride,), (padding,), rhs_dilation=(dilation,),
            dimension_numbers=numbers, bias=bias, implementation=implementation)
    y, pullback = jax.vjp(conv, x, w, bias)
    return y, *pullback(dy)

def laid_out(array, spec, own):
    return np.transpose(array, [own.index(axis) for axis in spec])

threads = lambda: len(os.listdir("/proc/self/task"))
jax.block_until_ready(jax.jit(lambda x: x @ x)(jnp.ones((600, 600))))  # starts the threads of XLA
for name, (layout, x_shape, w_shape, stride, padding, dilation, problems) in CASES.items():
    random, numbers = np.random.default_rng(7), LAYOUT[layout]
    size = (x_shape[2] + sum(padding) - (w_shape[2] - 1) * dilation - 1) // stride + 1
    arrays = []
    for shape, own, spec in ((x_shape, "NCH", numbers[0]), (w_shape, "OIH", numbers[1]), (w_shape[:1], "O", "O"),
                             ((x_shape[0], w_shape[0], size), "NCH", numbers[2])):
        each = [laid_out(random.standard_normal(shape, "float32"), spec, own) for _ in range(max(problems, 1))]
        arrays.append(np.stack(each) if problems else each[0])

    def run(implementation, arrays):
        function = lambda *a: gradients(implementation, numbers, stride, padding, dilation, *a)
        compiled = jax.jit(jax.vmap(function) if problems else function).lower(*arrays).compile()
        before = threads()
        found = jax.block_until_ready(compiled(*arrays))
        return found, threads() - before

    found, started = run("onednn", arrays)
    print(name, started, sep=",")
    exact, _ = run("xla", [a.astype("float64") for a in arrays])
    for result, a, b in zip(("y", "dx", "dw", "db"), found, exact, strict=True):
        error = float(jnp.abs(a - b).max() / jnp.abs(b).max())
        assert a.shape == b.shape and error < 4e-6, (name, result, error)
"""


def test_parts_of_the_batch_run_on_threads_of_xla(run_python):
    """They start no team, which would be four more threads. The last case is computed by a team."""
    environment = {"OMP_NUM_THREADS": "5", "JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "False"}
    lines = run_python(_PARTS, **environment).stdout.splitlines()
    *divided, team = (int(line.split(",")[1]) for line in lines)
    assert divided == [0, 0, 0], lines
    assert team >= 4, lines


_TEMPORARY = """
import jax
import jaxgrad

def temporary(images):
    shapes = (images, 40, 24), (5, 24, 4), (images, 36, 4)
    def gradient(x, w, dy):
        numbers = "NHC", "HIO", "NHC"
        conv = lambda w: jaxgrad.conv_general_dilated(x, w, (1,), "VALID", dimension_numbers=numbers,
                                                      implementation="onednn")
        return jax.vjp(conv, w)[1](dy)
    arrays = [jax.ShapeDtypeStruct(shape, "float32") for shape in shapes]
    return jax.jit(gradient).lower(*arrays).compile().memory_analysis().temp_size_in_bytes

print(*map(temporary, (252, 254, 251)))
"""


def test_batches_without_small_divisors_take_little_memory(run_python):
    """Each part has a weight gradient of its own. Parts that divide 254 = 2 * 127 or 251 images could be 127 or 251."""
    near, *others = map(int, run_python(_TEMPORARY, OMP_NUM_THREADS="2", JAX_PLATFORMS="cpu").stdout.split())
    assert max(others) < 2 * near
