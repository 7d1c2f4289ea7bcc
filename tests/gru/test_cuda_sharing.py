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
T, PROBLEMS, LAYERS = 12, 5, 3
ALLOWED = {"float32": 1e-4, "bfloat16": 2e-2}  # errors, to the largest value of an array

def layer(rng, B, I, H, dtype, has_ends):
    "The operands of a layer; with `has_ends`, rows of several lengths and episodes."
    shapes = dict(x=(T, B, I), w=(1, 3 * H, I), r=(1, 3 * H, H), b=(1, 6 * H), initial_h=(1, B, H))
    arrays = {name: jnp.asarray(rng.standard_normal(shape) / H**0.5, dtype) for name, shape in shapes.items()}
    ends = dict(sequence_lens=rng.integers(0, T + 1, B).astype(np.int32), reset=rng.random((T, B)) < 0.2)
    return arrays, jax.tree.map(jnp.asarray, ends) if has_ends else {}

def step(implementation):
    "Value and gradients of the layers: enough launches for a CUDA graph."
    def value(layers, ends):
        x = layers[0]["x"]
        for layer, of_layer in zip(layers, ends):
            x, last = jaxgrad.gru(**layer | dict(x=x), **of_layer, implementation=implementation)
            x = x[:, 0]
        return jnp.sum(jnp.sin(3 * x.astype(jnp.float32))) + jnp.sum(last.astype(jnp.float32))
    return jax.jit(jax.value_and_grad(value))

def largest_error(B, H, dtype, launches):
    "Of all results of all launches, which take turns with problems in arrays of their own, to the error allowed."
    rng = np.random.default_rng(H)
    problems = [
        list(zip(*[layer(rng, B, H if i else 24, H, dtype, has_ends=i == 1) for i in range(LAYERS)]))
        for _ in range(PROBLEMS)
    ]
    as_float32 = lambda tree: jax.tree.map(lambda a: a.astype(jnp.float32), tree)
    reference, op = step("xla"), step("cuda")
    expected = [reference(as_float32(layers), ends) for layers, ends in problems]
    scales = [jax.tree.map(lambda a: jnp.abs(a).max() + 1e-30, found) for found in expected]

    @jax.jit
    def error(found, expected, scale):
        each = jax.tree.map(lambda a, b, s: jnp.abs(a - b).max() / s, as_float32(found), expected, scale)
        return jnp.nan_to_num(jnp.stack(jax.tree.leaves(each)), nan=jnp.inf).max()

    worst = jnp.zeros(())
    for i in range(launches):
        k = i % PROBLEMS
        worst = jnp.maximum(worst, error(op(*problems[k]), expected[k], scales[k]))
    return float(worst) / ALLOWED[dtype]

def recorded():
    return cuda.module.conv_plan_cache_info()["recorded"]
"""


@pytest.fixture
def run(run_python):
    def run(script):
        found = run_python(_LAUNCHES + script, XLA_PYTHON_CLIENT_PREALLOCATE="false")
        return json.loads(found.stdout.splitlines()[-1])

    return run


# Rows, hidden units and dtype: blocks, clusters, blocks on tensor cores, and teams.
_SORTS = [(20, 128, "float32"), (9, 200, "float32"), (1000, 64, "bfloat16"), (40, 512, "float32")]


@pytest.mark.parametrize("sizes", _SORTS, ids=str)
def test_a_program_that_runs_a_thousand_times(run, sizes):
    """XLA records its calls into a CUDA graph, and replays it with the arrays of another problem."""
    error, recorded = run(f"print(json.dumps([largest_error(*{sizes}, 1000), recorded()]))")
    assert error < 1
    assert recorded > 0


def test_two_processes(run):
    def script(rows):
        sorts = [*_SORTS[:-1], (rows, *_SORTS[-1][1:])]
        return f"print(json.dumps([largest_error(*sizes, 300) for sizes in {sorts}]))"

    with ThreadPoolExecutor(2) as pool:
        assert max(max(errors) for errors in pool.map(run, map(script, (40, 64)))) < 1


def test_threads(run):
    errors = run("""
sizes, errors = [(20, 128), (40, 512), (9, 300), (64, 256)], []
threads = [
    threading.Thread(target=lambda s=s: errors.append(largest_error(*s, "float32", 200))) for s in sizes
]
for thread in threads: thread.start()
for thread in threads: thread.join()
print(json.dumps(errors))
""")
    assert len(errors) == 4
    assert max(errors) < 1
