"""Times of functions: medians of samples that the functions take in turns, so that other load affects all of them."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint

_ROUNDS, _SECONDS = 7, 0.2  # at least so many samples of each function, and so much time for all of them
_FEW_ROUNDS, _HOPELESS = 3, 3.0  # after so many rounds, functions that take so much longer than the fastest drop out
_SETTLE_SECONDS = 0.02  # of untimed calls before a sample on a CPU: the threads of the previous function go to sleep
_LONG_SECONDS = 0.5  # a call that takes longer needs none of these
_SAMPLE_SECONDS = {"cpu": 1e-3, "gpu": 1e-2}  # of calls, at least
_START_SECONDS = 5e-4  # in which the host starts a program on a GPU
_CALLS_IN_A_PROGRAM = 8  # on a GPU, where starting a program takes longer than a small kernel
_OPERAND_BYTES = 1 << 28  # of all these calls
_DRAWN_ELEMENTS = 1 << 20


@dataclasses.dataclass(frozen=True)
class Program:
    """A compiled program that makes one or more calls of a function.

    Attributes:
      run: starts the program and returns its results.
      calls: the calls in it.
      lower_repeated: lowers a program that repeats the calls so often, and returns the function that compiles it.
    """

    run: Callable[[], Any]
    calls: int = 1
    lower_repeated: Callable[[int], Callable[[], Program]] | None = None

    def seconds(self, times: int) -> float:
        """Of so many runs."""
        start = time.perf_counter()
        for _ in range(times):
            results = self.run()  # frees the results of the previous run
        jax.block_until_ready(results)
        return time.perf_counter() - start


def with_arrays(function: Callable[..., Any], arrays: Sequence[jax.Array]) -> Program:
    """A call of a function."""
    program = jax.jit(function).lower(*arrays).compile()
    return Program(lambda: program(*arrays))


def random_operands(
    operands: Sequence[jax.ShapeDtypeStruct | np.ndarray],
    deviations: Sequence[float] | None = None,
    *,
    one_call_a_program: bool = False,
) -> list[list[jax.Array]]:
    """Random operands of the given shapes: on a GPU several copies, one for each call in a program.

    Args:
      operands: their shapes and dtypes. An array is taken as it is.
      deviations: the standard deviations, by default 1.
      one_call_a_program: as in `Measurable`.
    """
    calls = 1
    if jax.default_backend() != "cpu" and not one_call_a_program:
        size = sum(math.prod(operand.shape) * operand.dtype.itemsize for operand in operands)
        calls = min(_CALLS_IN_A_PROGRAM, max(1, _OPERAND_BYTES // max(1, size)))
    deviations = deviations or [1.0] * len(operands)
    drawn = [_drawn(*each, seed) for seed, each in enumerate(zip(operands, deviations, strict=True))]
    return [drawn, *([jnp.copy(array) for array in drawn] for _ in range(calls - 1))]


def with_sets(function: Callable[..., Any], sets: list[list[jax.Array]]) -> Program:
    """A call of a function for each set of operands. XLA cannot merge the calls: the operands are different arrays."""
    return lower_with_sets(function, sets)()


def lower_with_sets(
    function: Callable[..., Any], sets: list[list[jax.Array]], repeats: int = 1
) -> Callable[[], Program]:
    """Lowers the program of `with_sets`, with the calls repeated in a loop. Returns the function that compiles it."""

    def calls(sets: list[list[jax.Array]]) -> list[Any]:
        return [function(*each) for each in sets]

    def repeat(i: jax.Array, state: tuple[Any, Any]) -> tuple[Any, Any]:
        # Without the barrier, XLA moves calls out of the loop whose operands do not change. Without the layouts, it
        # moves the transposes out that each call needs elsewhere.
        sets, _ = lax.optimization_barrier((state[0], i))
        return sets, _row_major(calls(_row_major(sets)))

    def repeated(sets: list[list[jax.Array]]) -> list[Any]:
        empty = jax.tree.map(lambda result: jnp.zeros(result.shape, result.dtype), jax.eval_shape(calls, sets))
        return lax.fori_loop(0, repeats, repeat, (sets, empty))[1]

    lowered = jax.jit(calls if repeats == 1 else repeated).lower(sets)

    def compiled() -> Program:
        program = lowered.compile()
        return Program(lambda: program(sets), repeats * len(sets), partial(lower_with_sets, function, sets))

    return compiled


def _row_major(arrays: Any) -> Any:
    """The arrays in the layout that they have between programs."""

    def constrained(array: jax.Array) -> jax.Array:
        if not jnp.issubdtype(array.dtype, jnp.number):
            return array
        return with_layout_constraint(array, Layout(major_to_minor=tuple(range(array.ndim))))

    return jax.tree.map(constrained, arrays)


def compile_all(lowered: Mapping[str, Callable[[], Program]]) -> dict[str, Program]:
    """Compiles programs on several threads and runs each once. Those that fail, such as for too little memory, are left
    out. One that fails to compile there, such as for the memory that the others take, is compiled again alone.
    """
    programs = {}
    with ThreadPoolExecutor() as threads:
        compiling = {name: threads.submit(compiled) for name, compiled in lowered.items()}
    for name, found in compiling.items():
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            programs[name] = run_once(lowered[name]() if found.exception() else found.result())
    return programs


def repeated_on_gpu(programs: Mapping[str, Program]) -> dict[str, Program]:
    """On a GPU, programs that repeat short calls, so that a run takes as long as a sample; on a CPU the same programs.

    The host takes time to start a program, and more for kernels of XLA than for those of a custom call. Where a call
    takes less, the time of a program that makes it once is that of the host.
    """
    if jax.default_backend() == "cpu":
        return dict(programs)
    lowered = {}
    try:
        for name, program in programs.items():
            of_calls = max(_seconds_of_a_run(program) - _START_SECONDS, _START_SECONDS / 5)
            repeats = math.ceil(_sample_seconds() / of_calls)
            if repeats > 1 and program.lower_repeated is not None:
                lowered[name] = program.lower_repeated(repeats)
    except jax.errors.JaxRuntimeError:  # cuDNN's engines are measured again
        return dict(programs)
    compiled = compile_all(lowered)
    # Not some of them: the time of a call differs between the two kinds of program.
    return {**programs, **compiled} if len(compiled) == len(lowered) else dict(programs)


def _drawn(operand: jax.ShapeDtypeStruct | np.ndarray, deviation: float, seed: int) -> jax.Array:
    if isinstance(operand, np.ndarray):
        return jax.device_put(operand)
    # NumPy's, of which nothing is compiled for each shape. Large arrays repeat them.
    values = deviation * np.random.default_rng(seed).standard_normal(_DRAWN_ELEMENTS, np.float32)
    array = np.empty(operand.size, operand.dtype)  # np.resize takes long to find that there is too little memory
    for start in range(0, array.size, values.size):
        part = array[start : start + values.size]
        part[:] = values[: part.size]
    return jax.device_put(array.reshape(operand.shape))


def run_once(program: Program) -> Program:
    """Runs a program, which may lack memory, and returns it."""
    jax.block_until_ready(program.run())
    return program


def medians(programs: Mapping[str, Program]) -> dict[str, float]:
    """The median seconds of one call of each program's function."""
    return {name: statistics.median(samples) for name, samples in samples_in_turns(programs).items()}


def samples_in_turns(programs: Mapping[str, Program], seconds_of_all: float = 0) -> dict[str, list[float]]:
    """Seconds of one call of each program's function, of several samples: for at least `seconds_of_all`."""
    once = {name: _seconds_of_a_run(program) for name, program in programs.items()}
    seconds: dict[str, list[float]] = {name: [] for name in programs}
    start, names, rounds = time.perf_counter(), list(programs), 0
    while rounds < _ROUNDS or time.perf_counter() - start < max(_SECONDS, seconds_of_all):
        names.append(names.pop(0))  # the first of a round changes from round to round
        for name in names:
            program, runs = programs[name], math.ceil(_sample_seconds() / once[name])
            if once[name] < _LONG_SECONDS:
                _settle(program)
            seconds[name].append(program.seconds(runs) / (runs * program.calls))
        rounds += 1
        if rounds == _FEW_ROUNDS:
            limit = _HOPELESS * min(statistics.median(samples) for samples in seconds.values())
            names = [name for name in names if min(seconds[name]) < limit]
    return seconds


def _seconds_of_a_run(program: Program) -> float:
    first = program.seconds(1)
    return first if first > _sample_seconds() else min(program.seconds(1) for _ in range(2))


def _sample_seconds() -> float:
    return _SAMPLE_SECONDS.get(jax.default_backend(), 1e-2)


def _settle(program: Program) -> None:
    if jax.default_backend() != "cpu":
        return
    end = time.perf_counter() + _SETTLE_SECONDS
    while time.perf_counter() < end:
        program.seconds(1)
