"""The CUDA kernels of the GRU beside other programs on the GPU, in other processes or threads, and in CUDA graphs.

The blocks of a kernel wait for each other, so that a launch of which some blocks cannot run would never end.
"""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import pytest

pytestmark = pytest.mark.gpu

_LAUNCHES = """
import json, sys, threading
import jax, jax.numpy as jnp, numpy as np
import jaxgrad
from jaxgrad._src.native import cuda

jax.config.update("jax_default_matmul_precision", "highest")
T, KINDS = 12, 5

def operands(rng, B, I, H):
    shapes = (T, B, I), (1, 3 * H, I), (1, 3 * H, H), (1, 6 * H), (1, B, H)
    return [jnp.asarray(rng.standard_normal(shape) / H**0.5, jnp.float32) for shape in shapes]

def step(implementation):
    "Value and gradients of three layers: enough launches for a CUDA graph. Changes with `kind`."
    def value(layers, kind):
        x = layers[0][0] * (1 + kind)
        for _, w, r, b, h in layers:
            x, last = jaxgrad.gru(x, w, r, b, initial_h=h, implementation=implementation)
            x = x[:, 0]
        return jnp.sum(jnp.sin(3 * x)) + jnp.sum(last)
    return jax.jit(jax.value_and_grad(value))

def largest_error(B, H, launches, seed=0):
    "Of all results of all launches, to the largest value of each array."
    rng = np.random.default_rng(seed)
    layers = [operands(rng, B, 24 if i == 0 else H, H) for i in range(3)]
    expected = [step("xla")(layers, kind) for kind in range(KINDS)]
    scales = [jax.tree.map(lambda a: jnp.abs(a).max() + 1e-30, found) for found in expected]
    op = step("cuda")

    @jax.jit
    def error(found, expected, scale):
        each = jax.tree.map(lambda a, b, s: jnp.abs(a - b).max() / s, found, expected, scale)
        return jnp.nan_to_num(jnp.stack(jax.tree.leaves(each)), nan=jnp.inf).max()

    worst = jnp.zeros(())
    for i in range(launches):
        kind = i % KINDS
        worst = jnp.maximum(worst, error(op(layers, kind), expected[kind], scales[kind]))
    return float(worst)

def recorded():
    return cuda.module.conv_plan_cache_info()["recorded"]
"""


@pytest.fixture
def run(run_python):
    def run(script):
        found = run_python(_LAUNCHES + script, XLA_PYTHON_CLIENT_PREALLOCATE="false")
        return json.loads(found.stdout.splitlines()[-1])

    return run


@pytest.mark.parametrize(("B", "H"), [(20, 128), (40, 512)])
def test_a_program_that_runs_a_thousand_times(run, B, H):
    """XLA records its calls into a CUDA graph, and replays it with new arrays."""
    error, recorded = run(f"print(json.dumps([largest_error({B}, {H}, 1000), recorded()]))")
    assert error < 1e-4
    assert recorded > 0


def test_two_processes(run):
    def script(rows):
        return f"print(json.dumps([largest_error(*sizes, 300) for sizes in ((20, 128), ({rows}, 512))]))"

    with ThreadPoolExecutor(2) as pool:
        assert max(max(errors) for errors in pool.map(run, map(script, (40, 64)))) < 1e-4


def test_threads(run):
    errors = run("""
sizes, errors = [(20, 128), (40, 512), (9, 300), (64, 256)], []
threads = [threading.Thread(target=lambda s=s: errors.append(largest_error(*s, 200))) for s in sizes]
for thread in threads: thread.start()
for thread in threads: thread.join()
print(json.dumps(errors))
""")
    assert len(errors) == 4
    assert max(errors) < 1e-4
