"""`jaxgrad.tune`: measures every implementation of the calls of a function on the device at hand."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax

from jaxgrad._src.batch_norm import tuning as batch_norm_tuning
from jaxgrad._src.batch_norm.params import BatchNormProblem
from jaxgrad._src.conv import tuning as conv_tuning
from jaxgrad._src.conv.equation import Equation
from jaxgrad._src.conv.params import ConvCall
from jaxgrad._src.core import checks, settings
from jaxgrad._src.core.environment import current_environment, share_first_environment
from jaxgrad._src.core.function_of_arrays import function_of_arrays
from jaxgrad._src.core.op import platform_of
from jaxgrad._src.core.processes import text_of_first_process
from jaxgrad._src.core.tuning import Choice, Measurable, RecordedCall, Recorder
from jaxgrad._src.core.warn import warn_caller
from jaxgrad._src.gru import tuning as gru_tuning
from jaxgrad._src.gru.params import GruProblem
from jaxgrad._src.tuning.progress import with_progress
from jaxgrad._src.tuning.timing import Program, lower_with_sets, medians, random_operands, run_once, with_arrays
from jaxgrad._src.tuning.tuning import Tuning, from_json, to_json

_logger = logging.getLogger("jaxgrad")

_MIN_GAIN = 1.03  # a default that is slower by less stays: times differ as much from run to run


def tune(function: Callable[..., Any], /, *args: Any, progress: bool = True, **kwargs: Any) -> Tuning:
    """Measures every implementation of the calls in a function on this machine's device.

    The calls are those of jaxgrad's ops, and the convolutions that `jaxgrad.accelerate` accelerates, with the gradients
    that the function computes and the sizes that `vmap` makes. Each runs alone, on random data, on every implementation
    that supports it, XLA included. Calls that force an implementation are not measured. If the function uses
    forward mode on jaxgrad's ops, call `tune` inside `jaxgrad.forward_mode`.

    Args:
      function: the function, such as a training step, which may be one of `jax.jit`, `nnx.jit` or
        `equinox.filter_jit`.
      *args: the arguments of a call. Arrays may be `jax.ShapeDtypeStruct`. With arrays the function itself is timed
        too, without and with the tuning, and the arrays are not donated.
      progress: whether to show the progress, and at the end what the tuning saves, on `sys.stderr`.
      **kwargs: the keyword arguments of the call.

    Returns:
      A `jaxgrad.Tuning`, which is not in force yet. In a program of several processes, each of which must call `tune`,
      the first process measures and all return its choices. Over a mesh, the shards are measured.

    Raises:
      TypeError: function is not callable, or progress is not a bool.

    Warns:
      UserWarning: the function has no call to measure.

    Examples:
      >>> def loss(w, x):
      ...   return jnp.sum(jaxgrad.conv_general_dilated(x, w, (1, 1), "SAME") ** 2)
      >>> w, x = jnp.ones((8, 8, 3, 3)), jnp.ones((2, 8, 16, 16))
      >>> tuning = jaxgrad.tune(jax.grad(loss), w, x, progress=False)
      >>> jaxgrad.config.update(tuning=tuning)
      >>> jaxgrad.config.update(tuning=None)
    """
    if not callable(function):
        raise TypeError(f"jaxgrad.tune: function must be callable, got {type(function).__name__}")
    progress = checks.check_flag("jaxgrad.tune", "progress", progress)
    with jax.disable_jit(False):
        return _tune(*function_of_arrays(function, args, kwargs), progress)


def _tune(call: Callable[..., Any], arrays: list[Any], progress: bool) -> Tuning:
    recorder = Recorder()
    with settings.override(tuning=recorder):
        jax.jit(call).lower(*arrays).compile()  # over a mesh, shards are lowered while XLA compiles
    if not recorder.calls:
        warn_caller(
            "jaxgrad.tune: the function has no call to measure. jaxgrad.tune measures jaxgrad's ops without "
            "implementation=, and convolutions inside jaxgrad.accelerate.",
            UserWarning,
        )
    share_first_environment()
    tuning = from_json(text_of_first_process(lambda: to_json(_measured(recorder, progress))))
    if progress and jax.process_count() == 1:
        print(_summary(call, arrays, tuning), file=sys.stderr)
    return tuning


def _measured(recorder: Recorder, progress: bool) -> Tuning:
    choices = {}
    platform, calls = current_environment().platform, recorder.calls.items()
    with settings.override(tuning=None):
        for text, recorded in with_progress("jaxgrad.tune", calls) if progress else calls:
            if choice := measured_choice(recorded, platform):
                choices[text] = choice
                _logger.info("measured %s: %s, in microseconds: %s", text, choice.implementation, choice.times)
    return Tuning({current_environment(): choices})


def measured_choice(recorded: RecordedCall, platform: str) -> Choice | None:
    """Measures a call; None if only one implementation supports it."""
    measurable = _measurable(recorded, platform)
    try:
        sets = random_operands(measurable.operands, one_call_a_program=measurable.one_call_a_program)
    except jax.errors.JaxRuntimeError:  # such as too little memory
        return None
    programs = _programs(measurable, sets)
    default = _default(recorded, platform)
    if len(programs) < 2 or default not in programs:
        return None
    times = {name: round(1e6 * seconds, 3) for name, seconds in medians(programs).items()}
    fastest = min(times, key=lambda name: times[name] * (1 if name == default else _MIN_GAIN))
    return Choice(fastest, default, times)


def _programs(measurable: Measurable, sets: list[list[jax.Array]]) -> dict[str, Program]:
    """By implementation. An implementation that fails, such as for too little memory, is left out.

    XLA compiles on several threads. A program that fails there, such as for the memory that the other programs take, is
    compiled again alone. The programs are lowered on one thread, because lowering measures cuDNN's engines.
    """
    lowered, programs = {}, {}
    for name, function in measurable.functions.items():
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            lowered[name] = lower_with_sets(function, sets)
    with ThreadPoolExecutor() as threads:
        compiling = {name: threads.submit(compiled) for name, compiled in lowered.items()}
    for name, found in compiling.items():
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            programs[name] = run_once(lowered[name]() if found.exception() else found.result())
    return programs


def _measurable(recorded: RecordedCall, platform: str) -> Measurable:
    call = recorded.call
    if isinstance(call, Equation):
        return conv_tuning.measurable_equation(call, platform)
    if isinstance(call, ConvCall):
        return conv_tuning.measurable_pass(recorded.pass_name, call, platform)
    if isinstance(call, BatchNormProblem):
        return batch_norm_tuning.measurable(call, platform)
    assert isinstance(call, GruProblem)
    return gru_tuning.measurable(call, platform)


def _default(recorded: RecordedCall, platform: str) -> str:
    if isinstance(recorded.call, Equation):
        return recorded.implementations[0]
    return next((name for name in recorded.implementations if platform_of(name) == platform), "xla")


def _summary(call: Callable[..., Any], arrays: list[Any], tuning: Tuning) -> str:
    """The number of calls that the tuning changes and, if the arguments are arrays, the time of the whole function."""
    changed = sum(choice.implementation != choice.default for choice in tuning.choices.values())
    counted = f"jaxgrad.tune: another implementation is faster for {changed} of {len(tuning.choices)} calls"
    if not changed or any(isinstance(array, jax.ShapeDtypeStruct) for array in arrays):
        return counted
    programs = {}
    try:
        for name, in_force in {"without": None, "with": tuning}.items():
            with settings.override(tuning=in_force):
                programs[name] = run_once(with_arrays(call, arrays))
    except jax.errors.JaxRuntimeError as error:  # a copy of all results may not fit beside the arguments
        return f"{counted}; the function could not be timed: {str(error).splitlines()[0]}"
    seconds = medians(programs)
    ms = {name: f"{1e3 * value:.4g} ms" for name, value in seconds.items()}
    return f"{counted}; the function takes {ms['with']}, {ms['without']} without the tuning"
