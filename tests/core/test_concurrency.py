"""All ops traced, compiled and run from many threads at once; and asynchronous dispatch."""

from __future__ import annotations

import time

import jax
import pytest
from backends import CPU_KERNEL
from op_cases import OPS, op_case

_SIXTEEN_THREADS = """
import faulthandler, threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
import jax, numpy as np
from op_cases import OPS, op_case, values_and_gradients

THREADS = 16
faulthandler.dump_traceback_later(200, exit=True)  # a deadlock
cases = [op_case(OPS[i % len(OPS)], size=2 + i) for i in range(THREADS)]
begin = threading.Barrier(THREADS)


def program(i):
    return jax.jit(partial(values_and_gradients, cases[i].call("cpu")))


def traced_and_run(i):
    begin.wait()
    run = program(i)
    return run, jax.tree.map(np.asarray, run(*cases[i].arrays))


def every_program_again(runs, i):
    order = np.random.default_rng(i).permutation(np.repeat(np.arange(THREADS), 5))
    return [(k, jax.tree.map(np.asarray, runs[k](*cases[k].arrays))) for k in order]


with ThreadPoolExecutor(THREADS) as pool:
    runs, first = zip(*pool.map(traced_and_run, range(THREADS)))
    later = [found for founds in pool.map(partial(every_program_again, runs), range(THREADS)) for found in founds]

alone = [run(*case.arrays) for run, case in zip(runs, cases)]
for k, found in [*enumerate(first), *later]:
    jax.tree.map(np.testing.assert_array_equal, found, alone[k])

texts = [run.lower(*case.arrays).as_text() for run, case in zip(runs, cases)]
jax.clear_caches()
for k, text in enumerate(texts):
    assert program(k).lower(*cases[k].arrays).as_text() == text, cases[k].op
print(len(later))
"""


def test_sixteen_threads(run_python):
    """Sixteen shapes of five ops, traced and called from all threads: programs and results match a single thread."""
    assert int(run_python(_SIXTEEN_THREADS, JAX_PLATFORMS="cpu").stdout) == 16 * 16 * 5


@pytest.mark.parametrize("op", OPS[:-2])  # group norm stands for its family
def test_calls_return_before_completion(op):
    """The program holds other work too: XLA's CPU client runs a lone custom call on the calling thread."""
    case = op_case(op, size=200_000)
    function = case.call("cpu")
    call = jax.jit(lambda first, *others: function(first + 1, *others))
    arrays = CPU_KERNEL.put(case.arrays)
    jax.block_until_ready(call(*arrays))
    for _ in range(20):  # other processes may delay a single attempt
        start = time.perf_counter()
        results = call(*arrays)
        returned = time.perf_counter() - start
        jax.block_until_ready(results)
        if returned < (time.perf_counter() - start) / 4:
            return
    pytest.fail("none of twenty calls returned before completion")
