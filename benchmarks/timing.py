"""Contenders and their times: the contenders take turns, so that other load on the machine affects all of them."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import tempfile
import time
import traceback
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks import lax_variants
from benchmarks.contender_names import LAX
from benchmarks.options import Effort

_SETTLE_SECONDS = 0.02  # of untimed calls first: the worker threads of the previous contender go to sleep
_FEW_SAMPLES, _MANY_SECONDS = 3, 3.0
_GPU_SAMPLE_SECONDS = 0.02  # of calls in one timed run on a GPU
_TRACED_CALLS = 12
_WARM_SECONDS = 0.1  # of calls before the timed ones, while the clocks rise
_BUSY_ELEMENTS = 1 << 29  # a kernel on this many takes a millisecond, in which calls queue up
_IN_PROGRAM_SECONDS = 0.02  # of calls in one program, so that its dispatch does not count
_CALLS_IN_TURN = 16
_GPU_LOOP_SECONDS = 0.3  # of training steps: their start and end take milliseconds, more on several devices


@dataclasses.dataclass(frozen=True)
class Contender:
    """Something to time.

    Attributes:
      name: the name in the tables.
      sample: runs the contender and returns the seconds of one call.
      outputs: the results, to compare with the others: float32 arrays in the same order for all contenders.
      temporary_bytes: the memory of the compiled call beyond its operands and results, where known.
      peak_bytes: the peak memory of a call, operands and results included, where known.
      program: the text of the compiled program, where it is kept.
      one_call: makes a single call, for a profile, where that is kept.
      details: what else a row has about the contender.
      has_same_results: whether it computes what the others compute.
    """

    name: str
    sample: Callable[[], float]
    outputs: list[np.ndarray]
    temporary_bytes: int | None = None
    peak_bytes: int | None = None
    program: str = ""
    one_call: Callable[[], Any] | None = None
    details: dict[str, Any] = dataclasses.field(default_factory=dict)
    has_same_results: bool = True


@dataclasses.dataclass(frozen=True)
class Times:
    """Milliseconds of one call: the median and two deciles of `samples` timed runs."""

    median: float
    p10: float
    p90: float
    samples: int


def host_seconds(run: Callable[[], Any]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def timed(what: str, function: Callable[[], Any]) -> Any:
    """The function's result; prints how long it took."""
    start = time.perf_counter()
    found = function()
    print(f"  {what} after {time.perf_counter() - start:.1f} s", flush=True)
    return found


def interleaved(contenders: Sequence[Contender], effort: Effort) -> dict[str, Times]:
    """Samples the contenders round-robin; the first of a round changes from round to round.

    A contender with many seconds and a few samples skips the remaining rounds.
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


class Call(NamedTuple):
    """A contender before it is compiled: `jax.jit(function)(*args)`, lowered in the context `in_force`.

    The name says with which flags of XLA it is compiled.
    """

    name: str
    function: Callable[..., Any]
    args: tuple[Any, ...]
    in_force: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext


def jax_contenders(calls: Sequence[Call]) -> list[Contender]:
    """Contenders that measure the wall time of a call on a CPU, and the device time on a GPU.

    The device time is the sum over all kernels and copies in the profile, without JAX's dispatch and without the gaps
    between kernels.
    """
    return [_one_call(name, *found) for (name, *_), found in zip(calls, _results_of(calls), strict=True)]


def _one_call(name: str, compiled: Callable[..., Any], args: Any, outputs: list[np.ndarray], memory: int) -> Contender:
    def run(calls: int = 1) -> None:
        jax.block_until_ready([compiled(*args) for _ in range(calls)])

    if jax.default_backend() == "gpu":
        return Contender(name, _one_by_one(lambda: _traced_seconds(run)), outputs, memory)
    return Contender(name, lambda: host_seconds(run), outputs, memory)


def jax_queued_contenders(calls: Sequence[Call]) -> list[Contender]:
    """As `jax_contenders`, for functions with loops, where gaps count: on a GPU the wall time of queued calls."""
    return [_queued(name, *found) for (name, *_), found in zip(calls, _results_of(calls), strict=True)]


class InProgram(NamedTuple):
    """A contender of `jax_in_program_contenders` before it is compiled.

    Attributes:
      function: what to time.
      args: its arguments. The first leaf is an array of floats, to which every call adds a number too small to count.
      precision: of matrix products, as `jax.default_matmul_precision` takes it.
      with_memory: whether the contender gets `temporary_bytes`, which takes another compilation on a GPU.
    """

    name: str
    function: Callable[..., Any]
    args: tuple[Any, ...]
    precision: str = "default"
    with_memory: bool = True


def jax_in_program_contenders(of: Sequence[InProgram]) -> list[Contender | Exception]:
    """As `jax_queued_contenders`, with many calls in one program on a GPU: dispatch would hide kernels of microseconds.

    A contender that fails is its exception.
    """
    on_gpu = jax.default_backend() == "gpu"

    def lowered(each: InProgram) -> list[Any]:
        with jax.default_matmul_precision(each.precision):
            one = jax.jit(each.function).lower(*each.args) if each.with_memory or not on_gpu else None
            return [one, _many_calls(each) if on_gpu else None]

    def contender(each: InProgram, programs: list[Any]) -> Contender:
        one, many = programs
        return _in_program(each, many, one) if on_gpu else _queued(each.name, *_results(one, *each.args))

    programs = _compiled([tried(lowered, each) for each in of])
    return [tried(contender, each, those) for each, those in zip(of, programs, strict=True)]


def tried(function: Callable[..., Any], *args: Any) -> Any:
    """The result, or the exception; that of an earlier step, where the last argument is one."""
    if isinstance(args[-1], Exception):
        return args[-1]
    try:
        return function(*args)
    except Exception as error:  # any error of a compiler
        traceback.clear_frames(error.__traceback__)  # they hold arrays
        return error


def _compiled(lowered: Sequence[Any]) -> list[Any]:
    """Compiles lowered programs. An item is a program, a list of programs and None, or an exception, which stays.

    On one GPU, XLA compiles on several threads: its autotuner locks the GPU for the runs that it times. A program that
    fails there, such as for too little memory, is compiled again alone. On several devices, programs are compiled in
    turn: XLA calls the partitioning rules of jaxgrad's ops while it compiles, and the rules measure cuDNN's engines.
    """

    def compiled(programs: Any) -> Any:
        if isinstance(programs, list):
            return [program and program.compile() for program in programs]
        return programs.compile()

    if jax.default_backend() != "gpu" or jax.device_count() > 1:
        return [tried(compiled, programs) for programs in lowered]
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        first = list(threads.map(partial(tried, compiled), lowered))
    return [
        tried(compiled, programs) if isinstance(found, Exception) else found
        for programs, found in zip(lowered, first, strict=True)
    ]


def raised(found: Sequence[Contender | Exception]) -> list[Contender]:
    """The contenders, if none of them is an exception."""
    for each in found:
        if isinstance(each, Exception):
            raise each
    return list(found)  # type: ignore[arg-type]


def _many_calls(each: InProgram) -> Any:
    """The program with a loop of calls, before it is compiled."""
    first, *others = jax.tree.leaves(each.args)
    tree = jax.tree.structure(each.args)
    results = jax.eval_shape(each.function, *each.args)

    def many(turns: jax.Array, first: jax.Array, *others: jax.Array) -> Any:
        empty = jax.tree.map(lambda out: jnp.zeros(out.shape, out.dtype), results)

        def call(i: jax.Array, _: Any) -> Any:
            varied = first + (i * 1e-30).astype(first.dtype)  # XLA would take equal calls out of the loop
            return each.function(*jax.tree.unflatten(tree, (varied, *others)))

        # The host waits for the condition of a loop, 20 to 50 us, unless the number of its iterations is a constant.
        def turn(i: jax.Array, results: Any) -> Any:
            return lax.fori_loop(0, _CALLS_IN_TURN, lambda j, results: call(i + j, results), results)

        return lax.fori_loop(0, turns, turn, empty)

    return jax.jit(many).lower(jnp.int32(0), first, *others)


def _in_program(each: InProgram, many: Any, one: Any) -> Contender:
    leaves = jax.tree.leaves(each.args)

    def run(turns: int) -> Any:
        return jax.block_until_ready(many(jnp.int32(turns), *leaves))

    def seconds(turns: int) -> float:
        return host_seconds(lambda: run(turns)) / (turns * _CALLS_IN_TURN)

    outputs = [np.asarray(leaf, np.float32) for leaf in jax.tree.leaves(run(1))]
    memory = one.memory_analysis().temp_size_in_bytes if one else None
    turns = _calls_per_sample(_CALLS_IN_TURN * seconds(1), _IN_PROGRAM_SECONDS)
    one_call = one and (lambda: jax.block_until_ready(one(*each.args)))
    return Contender(each.name, lambda: seconds(turns), outputs, memory, one_call=one_call)


def _queued(name: str, compiled: Callable[..., Any], args: Any, outputs: list[np.ndarray], memory: int) -> Contender:
    def run(calls: int = 1) -> None:
        jax.block_until_ready([compiled(*args) for _ in range(calls)][-1])

    run()
    calls = _calls_per_sample(host_seconds(run)) if jax.default_backend() == "gpu" else 1
    return Contender(name, lambda: host_seconds(lambda: run(calls)) / calls, outputs, memory)


def _results_of(calls: Sequence[Call]) -> list[tuple[Callable[..., Any], Any, list[np.ndarray], int]]:
    """`_results` of each call. Lowering jaxgrad's ops measures cuDNN's engines, so that calls are lowered in turn."""

    def lowered(each: Call) -> Any:
        with each.in_force():
            return _Lowered(each.name, jax.jit(each.function).lower(*each.args), print_time=False)

    programs = _compiled([lowered(each) for each in calls])
    return [_results(program, *each.args) for program, each in zip(raised(programs), calls, strict=True)]


def _results(compiled: Any, *args: Any) -> tuple[Callable[..., Any], Any, list[np.ndarray], int]:
    """The program, its arguments and results, and its memory in bytes beyond these."""
    outputs = [np.asarray(leaf, np.float32) for leaf in jax.tree.leaves(compiled(*args))]
    return compiled, args, outputs, compiled.memory_analysis().temp_size_in_bytes


def jax_loop_contenders(
    steps: Mapping[str, Callable[..., tuple[Any, Any]]],
    state: Any,
    *args: Any,
    in_force: Mapping[str, Callable[[], AbstractContextManager[None]]] | None = None,
) -> list[Contender | Exception]:
    """`state, _ = jax.jit(step)(state, *args)` in a loop, with the state donated, for each step by its name.

    A sample is one call on a CPU, many queued calls on a GPU, so that the device never waits for JAX. A contender that
    fails is its exception. A step is lowered in its context of `in_force`, and compiled outside of it: contexts of
    jaxgrad's ops are for one device only, because over several devices shards are lowered while XLA compiles.

    Prints the time to lower each step, which includes the search for cuDNN's engines, and the time to compile it. On
    one GPU, all steps but jax.lax compile concurrently.
    """

    def lowered(name: str) -> Any:
        with in_force[name]() if in_force else contextlib.nullcontext():
            lower = jax.jit(steps[name], donate_argnums=0).lower
            return _Lowered(name, timed(f"{name}: lowered", partial(lower, state, *args)), print_time=True)

    def contender(name: str, compiled: Any) -> Contender:
        return _loop(name, compiled, state, *args)

    all_lowered = {name: tried(lowered, name) for name in steps}
    programs: dict[str, Any] = {}
    # XLA's autotuner remembers what it measured in this process, but programs that compile concurrently each measure
    # the same operations. The step of jax.lax, which has the most for it, is compiled first and alone.
    for names in ([name for name in steps if name == LAX], [name for name in steps if name != LAX]):
        programs.update(zip(names, _compiled([all_lowered[name] for name in names]), strict=True))
    return [tried(contender, name, programs[name]) for name in steps]


class _Lowered(NamedTuple):
    name: str
    lowered: Any
    print_time: bool

    def compile(self) -> Any:
        compile = partial(self.lowered.compile, lax_variants.compiler_options(self.name))
        return timed(f"{self.name}: compiled", compile) if self.print_time else compile()


def _loop(name: str, compiled: Any, state: Any, *args: Any) -> Contender:
    state, rest = compiled(jax.tree.map(jnp.copy, state), *args)
    outputs = [np.array(leaf, np.float32) for leaf in jax.tree.leaves((state, rest))]

    def run(calls: int = 1) -> None:
        nonlocal state
        for _ in range(calls):
            state, _ = compiled(state, *args)
        jax.block_until_ready(state)

    run()
    on_gpu = jax.default_backend() == "gpu"
    calls = _calls_per_sample(host_seconds(run), _GPU_LOOP_SECONDS) if on_gpu else 1
    memory = compiled.memory_analysis()
    peak = (
        memory.argument_size_in_bytes
        + memory.output_size_in_bytes
        + memory.temp_size_in_bytes
        - memory.alias_size_in_bytes
    )

    def sample() -> float:
        return host_seconds(lambda: run(calls)) / calls

    return Contender(name, sample, outputs, memory.temp_size_in_bytes, peak, compiled.as_text())


def torch_contender(name: str, function: Callable[[], Any], outputs: list[np.ndarray]) -> Contender:
    """`function()` of PyTorch: the wall time of a call on a CPU, the device time of calls in a CUDA graph on a GPU."""
    if jax.default_backend() != "gpu":
        return Contender(name, lambda: host_seconds(function), outputs)
    from jaxgrad._src.bench import torch_calls

    program = torch_calls.program(function)
    program.run()
    return Contender(name, lambda: program.seconds(1) / program.calls, outputs)


def torch_queued_contender(name: str, function: Callable[[], Any], outputs: list[np.ndarray]) -> Contender:
    """The same for a function with loops or a whole step: on a GPU the time of calls that are queued one by one."""
    if jax.default_backend() != "gpu":
        return Contender(name, lambda: host_seconds(function), outputs)
    from jaxgrad._src.bench.torch_calls import gpu_seconds

    function()
    calls = _calls_per_sample(gpu_seconds(function))
    return Contender(name, lambda: gpu_seconds(function, calls) / calls, outputs)


def _calls_per_sample(seconds: float, sample_seconds: float = _GPU_SAMPLE_SECONDS) -> int:
    """The number of calls of `seconds` each in a timed run on a GPU."""
    return max(1, int(sample_seconds / seconds))


def _one_by_one(measure: Callable[[], list[float]]) -> Callable[[], float]:
    """Returns the values of one `measure()` one by one, then measures again."""
    found: deque[float] = deque()

    def sample() -> float:
        if not found:
            found.extend(measure())
        return found.popleft()

    return sample


def _traced_seconds(run: Callable[[int], None]) -> list[float]:
    """The device time of each of some consecutive calls."""
    busy, operand = _busy()
    start = time.perf_counter()
    while time.perf_counter() - start < _WARM_SECONDS:
        run(_TRACED_CALLS)

    def busy_then_run() -> None:
        busy(operand)
        run(_TRACED_CALLS)

    _, *events = _device_events(busy_then_run)  # the first is _busy's
    each, rest = divmod(len(events), _TRACED_CALLS)
    if rest:  # the calls differ in their number of kernels
        return [sum(event.duration_ns for event in events) / _TRACED_CALLS / 1e9]
    calls = (events[i : i + each] for i in range(0, len(events), each))
    return [sum(event.duration_ns for event in call) / 1e9 for call in calls]


def kernel_seconds(call: Callable[[], Any], kernels: Sequence[str]) -> dict[str, float]:
    """The device time that the GPU kernels of each name take in one call; without kernels that do not run."""
    call()

    def run() -> None:
        for _ in range(_TRACED_CALLS):
            call()

    events = _device_events(run)
    found = {name: [event.duration_ns for event in events if name in event.name] for name in kernels}
    return {name: sum(those) / _TRACED_CALLS / 1e9 for name, those in found.items() if those}


def _device_events(run: Callable[[], None]) -> list[Any]:
    """The kernels and copies of a GPU while a function runs, in the order of their starts."""
    options = jax.profiler.ProfileOptions()
    options.host_tracer_level, options.python_tracer_level = 0, 0
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            run()
        (file,) = Path(folder).rglob("*.xplane.pb")
        planes = list(jax.profiler.ProfileData.from_file(str(file)).planes)
    # A plane has a line for each stream, beside lines that sum these up.
    events = [
        event
        for plane in planes
        if plane.name.startswith("/device:GPU")
        for line in plane.lines
        if line.name.startswith("Stream")
        for event in line.events
    ]
    if not events:
        raise RuntimeError("the profile has no kernel: profiling needs CUPTI and permission to profile the GPU")
    return sorted(events, key=lambda event: event.start_ns)


@cache
def _busy() -> tuple[Callable[[jax.Array], jax.Array], jax.Array]:
    """A kernel bound by memory, and its operand."""
    operand = jnp.zeros((_BUSY_ELEMENTS,), jnp.float32)
    return jax.jit(lambda x: x + 1).lower(operand).compile(), operand
