"""Calls large enough for a team of oneDNN threads, from one thread and from many."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from backends import CPU_KERNEL, XLA
from conv_cases import ConvCase, cotangent, make_conv_inputs
from conv_references import lax_conv
from conv_running import assert_same, conv, run, terms

# More than four million multiplications each; one case for each kind of kernel and layout.
LARGE = {
    "channels last": ConvCase(
        batch=4, spatial=(23, 21), features=40, out_features=48, window=(3, 2), layout=("NHWC", "HWIO", "NHWC")
    ),
    "features first": ConvCase(batch=4, spatial=(23, 21), features=40, out_features=48, window=(3, 2), strides=(1, 2)),
    "pointwise": ConvCase(batch=5, spatial=(33, 31), features=40, out_features=24, window=(1, 1), padding="VALID"),
    "one feature": ConvCase(batch=6, spatial=(61, 53), features=1, out_features=32, window=(3, 5), padding="SAME"),
    "depthwise": ConvCase(
        batch=9, spatial=(53, 51), features=4, out_features=4, groups=4, window=(7, 7), padding="SAME"
    ),
}


@pytest.mark.parametrize("name", LARGE)
def test_values_and_gradients(name):
    case = LARGE[name]
    inputs = make_conv_inputs(case)
    dy = cotangent(jax.eval_shape(lax_conv(case), *inputs).shape, "float32")
    found = run(conv(CPU_KERNEL, **case.settings), inputs, dy)
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
    x = np.random.default_rng(size).standard_normal((2, size, 30, 32)).astype(np.float32)
    w = np.random.default_rng(1).standard_normal((3, 3, 32, 32)).astype(np.float32)
    op = lambda implementation: jaxgrad.conv_general_dilated(
        x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"), implementation=implementation)
    expected = np.asarray(op("xla"))
    for _ in range(5):
        np.testing.assert_allclose(op("cpu"), expected, rtol=0, atol=1e-3)

call(29)
before = len(os.listdir("/proc/self/task"))
with ThreadPoolExecutor(8) as pool:
    list(pool.map(call, range(30, 62)))
print(len(os.listdir("/proc/self/task")) - before)
"""


@pytest.mark.parametrize("team", [2, 12, 40])
def test_thread_count_stays_bounded(run_python, team):
    """If each of eight threads led a team of 40, there would be 320 threads."""
    extra = int(run_python(_SCRIPT, OMP_NUM_THREADS=str(team)).stdout)
    assert extra <= 8 + 16 + team  # the pool, the teams of callers, and one shared team
