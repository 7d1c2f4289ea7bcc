"""`jaxgrad.tune`: measures every implementation of the calls of a function on the device at hand."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from jaxgrad._src.choice import settings
from jaxgrad._src.choice.environment import current_environment, share_first_environment
from jaxgrad._src.choice.measured_choices import Choice, Recorder
from jaxgrad._src.core import checks
from jaxgrad._src.core.decorator import unsupported_kind
from jaxgrad._src.core.jax_internals import lower_all
from jaxgrad._src.core.processes import text_of_first_process
from jaxgrad._src.core.warn import warn_caller
from jaxgrad._src.run.function_of_arrays import function_of_arrays
from jaxgrad._src.tuning.choices import measured_choice
from jaxgrad._src.tuning.progress import with_progress
from jaxgrad._src.tuning.timing import medians, run_once, with_arrays
from jaxgrad._src.tuning.tuning import Tuning, from_json, to_json

_NEEDS_VALUES = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)
_logger = logging.getLogger("jaxgrad")


def tune(function: Callable[..., Any], /, *args: Any, progress: bool = True, **kwargs: Any) -> Tuning:
    """Measures every implementation of the calls in a function on this machine's device.

    The calls are those of jaxgrad's ops, and the convolutions that `jaxgrad.accelerate` accelerates, with the gradients
    that the function computes and the sizes that `vmap` makes. Each runs alone, on random data, on every implementation
    that supports it, XLA included. Calls that force an implementation are not measured. If the function uses
    forward mode on jaxgrad's ops, call `tune` inside `jaxgrad.forward_mode`.

    Args:
      function: the function, such as a training step, which may be one of `jax.jit`, `nnx.jit` or
        `equinox.filter_jit`.
      *args: the arguments of a call. Arrays may be `jax.ShapeDtypeStruct`. No array is donated.
      progress: whether to show the progress on `sys.stderr`, and at the end what the tuning saves. If that changes
        calls, the function itself is timed too, without any tuning and with this one, given arrays and one process. It
        runs many times then, with its side effects.
      **kwargs: the keyword arguments of the call.

    Returns:
      A `jaxgrad.Tuning`, which is not in force yet. In a program of several processes, each of which must call `tune`,
      the first process measures and all return its choices. Over a mesh, the shards are measured.

    Raises:
      TypeError: function is not callable, or is a class, a generator function or a coroutine function; tune is called
        while JAX traces a function; or progress is not a bool.
      jax.errors.ConcretizationTypeError, TracerArrayConversionError, TracerIntegerConversionError: the function needs
        the values of its arrays, as a training loop with `float(loss)` does. JAX traces the function: pass the step.
        Other errors of the function are raised as they are. An error or an interrupt (`KeyboardInterrupt`) during the
        measurements has the attribute `tuning`: a `Tuning` of the calls that were measured before. In a program of
        several processes, that of the first one has it.

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
    if kind := unsupported_kind(function):
        raise TypeError(f"jaxgrad.tune: function must not be {kind}, got {getattr(function, '__name__', function)}")
    progress = checks.check_flag("jaxgrad.tune", "progress", progress)
    with jax.disable_jit(False):
        return _tune(*function_of_arrays(function, args, kwargs), progress)


def _tune(call: Callable[..., Any], arrays: list[Any], progress: bool) -> Tuning:
    if any(isinstance(array, jax.core.Tracer) for array in (*arrays, jax.device_put(np.zeros(())))):
        raise TypeError(
            "jaxgrad.tune: arrays have no values here: call tune outside of functions that JAX traces, such as those "
            "under jax.jit, with arrays or jax.ShapeDtypeStruct"
        )
    recorder = Recorder()
    with settings.override(tuning=recorder):
        try:
            lower_all(call, *arrays)
        except _NEEDS_VALUES as error:
            error.add_note("jaxgrad.tune traces the function, as jax.jit does: pass the training step, not its loop.")
            raise
    if not recorder.calls:
        warn_caller(
            "jaxgrad.tune: the function has no call to measure. jaxgrad.tune measures jaxgrad's ops without "
            "implementation=, and convolutions inside jaxgrad.accelerate.",
            UserWarning,
        )
    share_first_environment()
    with _kept_in_errors(recorder) as choices:
        tuning = from_json(text_of_first_process(lambda: to_json(_measured(recorder, choices, progress))))
        if progress and jax.process_count() == 1:
            print(_summary(call, arrays, tuning), file=sys.stderr)
    return tuning


@contextlib.contextmanager
def _kept_in_errors(recorder: Recorder) -> Iterator[dict[str, Choice]]:
    """The choices that are made in the block. An error or an interrupt carries those that were made before it."""
    choices: dict[str, Choice] = {}
    try:
        yield choices
    except BaseException as error:
        if jax.process_index() == 0:  # the others measure nothing
            error.tuning = Tuning({current_environment(): choices})  # type: ignore[attr-defined]
            error.add_note(
                f"jaxgrad.tune has measured {len(choices)} of {len(recorder.calls)} calls: the attribute `tuning` of "
                "this exception has the choices."
            )
        raise


def _measured(recorder: Recorder, choices: dict[str, Choice], progress: bool) -> Tuning:
    platform, calls = current_environment().platform, recorder.calls.items()
    with settings.override(tuning=None):
        for text, recorded in with_progress("jaxgrad.tune", calls) if progress else calls:
            if choice := measured_choice(recorded, platform):
                choices[text] = choice
                _logger.info("measured %s: %s, in microseconds: %s", text, choice.implementation, choice.times)
    return Tuning({current_environment(): choices})


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
