"""The fastest implementation of a call: all are compiled, and timed in turns."""

from __future__ import annotations

import contextlib
import datetime

import jax

from jaxgrad._src.choice.measured_choices import Choice, Measurable, RecordedCall
from jaxgrad._src.choice.op import platform_of
from jaxgrad._src.conv import measurable as conv_measurable
from jaxgrad._src.conv.call.params import ConvCall
from jaxgrad._src.conv.equation import Equation
from jaxgrad._src.gru import measurable as gru_measurable
from jaxgrad._src.gru.params import GruProblem
from jaxgrad._src.norm import measurable as batch_norm_measurable
from jaxgrad._src.norm.params import NormProblem
from jaxgrad._src.pool import measurable as pool_measurable
from jaxgrad._src.pool.params import PoolProblem
from jaxgrad._src.tuning.timing import Program, compile_all, lower_with_sets, medians, random_operands, repeated_on_gpu

# A default that is slower by less stays. Times differ from run to run, and calls that are a little faster alone can
# take longer in a program.
_MIN_GAIN = 1.05


def measured_choice(recorded: RecordedCall, platform: str) -> Choice | None:
    """Measures a call; None if only one implementation supports it."""
    return fastest(_measurable(recorded, platform), _default(recorded, platform))


def fastest(measurable: Measurable, default: str) -> Choice | None:
    """The fastest function, which is the default where no other one is clearly faster.

    None if fewer than two of the functions run, or the default does not.
    """
    try:
        sets = random_operands(measurable.operands, one_call_a_program=measurable.one_call_a_program)
    except (jax.errors.JaxRuntimeError, MemoryError):  # too little memory on the device, or on the host
        return None
    programs = _programs(measurable, sets)
    if len(programs) < 2 or default not in programs:
        return None
    if not measurable.one_call_a_program:
        programs = repeated_on_gpu(programs)
    times = {name: round(1e6 * seconds, 3) for name, seconds in medians(programs).items()}
    chosen = min(times, key=lambda name: times[name] * (1 if name == default else _MIN_GAIN))
    return Choice(chosen, default, times, datetime.date.today().isoformat())


def _programs(measurable: Measurable, sets: list[list[jax.Array]]) -> dict[str, Program]:
    """By implementation, without those that fail. They are lowered on one thread: that measures cuDNN's engines."""
    lowered = {}
    for name, function in measurable.functions.items():
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            lowered[name] = lower_with_sets(function, sets)
    return compile_all(lowered)


def _measurable(recorded: RecordedCall, platform: str) -> Measurable:
    call = recorded.call
    if isinstance(call, Equation):
        return conv_measurable.measurable_equation(call, platform)
    if isinstance(call, ConvCall):
        return conv_measurable.measurable_pass(recorded.pass_name, call, platform)
    if isinstance(call, NormProblem):
        return batch_norm_measurable.measurable(call, platform)
    if isinstance(call, PoolProblem):
        return pool_measurable.measurable(call, platform)
    assert isinstance(call, GruProblem)
    return gru_measurable.measurable(call, platform)


def _default(recorded: RecordedCall, platform: str) -> str:
    if isinstance(recorded.call, Equation):
        return recorded.implementations[0]
    return next((name for name in recorded.implementations if platform_of(name) == platform), "xla")
