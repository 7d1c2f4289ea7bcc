"""Contenders and their times: each is called in turn, so that what else the machine does hits all of them alike."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

_SETTLE_SECONDS = 0.02  # of untimed calls before each timed one: worker threads of the contender before fall asleep
_FEW_SAMPLES, _MANY_SECONDS = 3, 3.0
_GPU_SAMPLE_SECONDS = 0.02  # of calls in one timed run on a GPU
_GPU_LOOP_SECONDS = 0.3  # of training steps: to begin and to await them takes milliseconds, more on several devices
_GPU_PROGRAM_SECONDS, _GPU_MOST_IN_ONE = 0.002, 10  # of calls in one program


@dataclasses.dataclass(frozen=True)
class Contender:
    """Something to time.

    Attributes:
      name: what the tables call it.
      sample: runs the contender and returns the seconds of one call.
      outputs: what it computes, for the comparison with the others: float32 arrays in an order that all share.
      temporary_bytes: the memory that the compiled call takes beyond its operands and results, where that is known.
      peak_bytes: the most memory that a call takes, operands and results included, where that is known.
      program: the text of the compiled program, where it is kept.
    """

    name: str
    sample: Callable[[], float]
    outputs: list[np.ndarray]
    temporary_bytes: int | None = None
    peak_bytes: int | None = None
    program: str = ""


@dataclasses.dataclass(frozen=True)
class Times:
    """Milliseconds of one call: the median and two deciles of `samples` timed runs."""

    median: float
    p10: float
    p90: float
    samples: int


@dataclasses.dataclass(frozen=True)
class Effort:
    """How long to measure: at least `rounds` rounds, and more until `seconds` have passed."""

    rounds: int
    seconds: float


def interleaved(contenders: Sequence[Contender], effort: Effort) -> dict[str, Times]:
    """Samples the contenders round-robin; the first of a round changes from round to round.

    A contender that has had many seconds and a few samples sits the other rounds out.
    """
    seconds: dict[str, list[float]] = {c.name: [] for c in contenders}
    start, rounds = time.perf_counter(), 0
    while rounds < effort.rounds or time.perf_counter() - start < effort.seconds:
        first = rounds % len(contenders)
        for contender in (*contenders[first:], *contenders[:first]):
            taken = seconds[contender.name]
            if len(taken) >= _FEW_SAMPLES and sum(taken) > _MANY_SECONDS:
                continue
            settled = time.perf_counter() + (_SETTLE_SECONDS if jax.default_backend() == "cpu" else 0)
            while time.perf_counter() < settled:
                contender.sample()
            taken.append(contender.sample())
        rounds += 1
    return {name: _times(samples) for name, samples in seconds.items()}


def _times(seconds: list[float]) -> Times:
    p10, median, p90 = (round(float(ms), 5) for ms in np.percentile(1e3 * np.array(seconds), (10, 50, 90)))
    return Times(median, p10, p90, len(seconds))


def jax_contender(name: str, function: Callable[..., Any], *args: Any) -> Contender:
    """`jax.jit(function)(*args)`: on a CPU one call a sample, on a GPU many, so that the device never waits for JAX."""
    compiled = jax.jit(function).lower(*args).compile()
    outputs = [np.asarray(leaf, np.float32) for leaf in jax.tree.leaves(compiled(*args))]
    memory = compiled.memory_analysis().temp_size_in_bytes
    run, in_one, programs = compiled, 1, 1
    if jax.default_backend() == "gpu":
        seconds = _seconds_of(lambda: jax.block_until_ready(compiled(*args)))
        in_one = int(np.clip(_GPU_PROGRAM_SECONDS / seconds, 1, _GPU_MOST_IN_ONE))
        programs = _calls_per_sample(in_one * seconds)
        run = jax.jit(_repeated(function, in_one)).lower(*args).compile()

    def sample() -> float:
        start = time.perf_counter()
        for _ in range(programs):
            results = run(*args)
        jax.block_until_ready(results)
        return (time.perf_counter() - start) / (programs * in_one)

    return Contender(name, sample, outputs, memory)


def jax_loop_contender(name: str, step: Callable[..., tuple[Any, Any]], state: Any, *args: Any) -> Contender:
    """`state, _ = jax.jit(step)(state, *args)` again and again, each in the memory of the last.

    On a CPU a sample is one call, on a GPU many, queued so that the device never waits for JAX.
    """
    compiled = jax.jit(step, donate_argnums=0).lower(state, *args).compile()
    state, rest = compiled(jax.tree.map(jnp.copy, state), *args)
    outputs = [np.array(leaf, np.float32) for leaf in jax.tree.leaves((state, rest))]

    def run(calls: int) -> None:
        nonlocal state
        for _ in range(calls):
            state, _ = compiled(state, *args)
        jax.block_until_ready(state)

    on_gpu = jax.default_backend() == "gpu"
    calls = _calls_per_sample(_seconds_of(lambda: run(1)), _GPU_LOOP_SECONDS) if on_gpu else 1

    def sample() -> float:
        start = time.perf_counter()
        run(calls)
        return (time.perf_counter() - start) / calls

    memory = compiled.memory_analysis()
    peak = (
        memory.argument_size_in_bytes
        + memory.output_size_in_bytes
        + memory.temp_size_in_bytes
        - memory.alias_size_in_bytes
    )
    return Contender(name, sample, outputs, memory.temp_size_in_bytes, peak, compiled.as_text())


def why_not_torch() -> str | None:
    """Why PyTorch cannot be a contender here; None where it can."""
    if find_spec("torch") is None:
        return "torch is not installed"
    import torch

    on_gpu = jax.default_backend() == "gpu"
    return "torch sees no GPU" if on_gpu and not torch.cuda.is_available() else None


def torch_contender(name: str, function: Callable[[], Any], outputs: list[np.ndarray], on_gpu: bool) -> Contender:
    """`function()` of PyTorch: wall time of one call on a CPU; on a GPU the device's own time of many."""
    import torch

    if not on_gpu:
        torch.set_num_threads(os.cpu_count() or 1)

        def sample() -> float:
            start = time.perf_counter()
            function()
            return time.perf_counter() - start

        return Contender(name, sample, outputs)

    def finished() -> None:
        function()
        torch.cuda.synchronize()

    calls = _calls_per_sample(_seconds_of(finished))
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def sample_gpu() -> float:
        before.record()
        for _ in range(calls):
            function()
        after.record()
        after.synchronize()
        return before.elapsed_time(after) / 1e3 / calls

    return Contender(name, sample_gpu, outputs)


def _seconds_of(call: Callable[[], Any]) -> float:
    """Of the second of two calls: the first may still set things up."""
    call()
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _calls_per_sample(seconds: float, sample_seconds: float = _GPU_SAMPLE_SECONDS) -> int:
    """On a GPU, of calls that take `seconds` each."""
    return max(1, int(sample_seconds / seconds))


def _repeated(function: Callable[..., Any], calls: int) -> Callable[..., Any]:
    """A program that calls `function(*args)` one time after the other and returns the outputs of the last call.

    One element of the smallest argument is taken from the outputs before, so that no two calls are alike: XLA would
    merge them, whatever barriers stand between. That costs a kernel of some two microseconds a call. A loop would cost
    more, for it carries the outputs and copies them.
    """

    def run(*args: Any) -> Any:
        outputs = function(*args)
        leaves, structure = jax.tree.flatten(args)
        smallest = min(range(len(leaves)), key=lambda i: leaves[i].size)
        for _ in range(calls - 1):
            output, changed = jax.tree.leaves(outputs)[0], leaves[smallest]
            element = lax.slice(output, (0,) * output.ndim, (1,) * output.ndim).reshape((1,) * changed.ndim)
            leaves[smallest] = lax.dynamic_update_slice(changed, element.astype(changed.dtype), (0,) * changed.ndim)
            outputs = function(*jax.tree.unflatten(structure, leaves))
        return outputs

    return run
