"""Measures calls: each pass of each, on jaxgrad, XLA and PyTorch in turns."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np

from jaxgrad._src.bench.call import Call, implementations
from jaxgrad._src.bench.results import JAXGRAD, PYTORCH, XLA, CallResult, PassResult, Results
from jaxgrad._src.choice.environment import current_environment
from jaxgrad._src.choice.explain import PassExplanation
from jaxgrad._src.tuning.progress import with_progress
from jaxgrad._src.tuning.timing import Program, random_operands, repeated_on_gpu, run_once, samples_in_turns, with_sets

_SECONDS = 1.0  # of samples of one pass, at least


def measure(calls: Sequence[Call], dtype: str, seconds: float, with_torch: bool) -> Results:
    """Measures calls in their order. After `seconds` it starts no other one. A call that fails is left out."""
    torch, left_out = _torch() if with_torch else (None, {})
    start, left = time.perf_counter(), list(calls)
    measured: list[CallResult] = []
    for _, call in with_progress("jaxgrad bench", [(call.text, call) for call in calls]):
        if measured and time.perf_counter() - start > seconds:
            break
        left.remove(call)
        if result := _tried(call.text, left_out, _measured, call, torch):
            measured.append(result)
    left_out |= {call.text: f"the {seconds:g} seconds were over" for call in left}
    return Results(current_environment(), torch.version() if torch else "", dtype, measured, left_out)


def _torch() -> tuple[Any, dict[str, str]]:
    """The module of PyTorch's contenders, or why there is none."""
    try:
        module = importlib.import_module("jaxgrad._src.bench.torch_calls")
    except ImportError as error:
        missing = error.name == "torch"
        return None, {PYTORCH: "it is not installed" if missing else f"it cannot be imported: {_brief(error)}"}
    problem = module.unavailable()
    return (None, {PYTORCH: problem}) if problem else (module, {})


def _measured(call: Call, torch: Any) -> CallResult:
    explained = implementations(call)
    sets = random_operands(call.operands(), call.deviations(), one_call_a_program=call.one_call_a_program)
    theirs: dict[str, Callable[[], Any]] = {}
    failed: dict[str, str] = {}
    if torch:
        theirs = _tried(PYTORCH, failed, torch.functions, call, sets[0]) or {}
    passes = {}
    for each in call.passes:
        makers = {
            JAXGRAD: partial(with_sets, each.of(call.on_jaxgrad), sets),
            XLA: partial(with_sets, each.of(call.on_xla), sets),
        }
        if theirs:
            makers[PYTORCH] = partial(torch.program, theirs[each.name])
        own_failed = dict(failed)
        programs = _programs(makers, own_failed)
        if not call.one_call_a_program:
            programs = repeated_on_gpu(programs)
        passes[each.name] = _measured_pass(programs, explained[each.name], own_failed)
    return CallResult(call.text, call.dtype, passes, call.total)


def _programs(makers: Mapping[str, Callable[[], Program]], failed: dict[str, str]) -> dict[str, Program]:
    programs = {}
    for name, make in makers.items():
        if program := _tried(name, failed, lambda make: run_once(make()), make):
            programs[name] = program
    return programs


def _measured_pass(
    programs: Mapping[str, Program], explained: tuple[PassExplanation, ...], failed: dict[str, str]
) -> PassResult:
    samples: dict[str, list[float]] = {name: [] for name in programs}
    result = PassResult(explained, samples, failed, _difference(programs))
    for _ in range(2):
        seconds = samples_in_turns(programs, _SECONDS) if programs else {}
        for name, taken in seconds.items():
            samples[name] += [1e3 * value for value in taken]
        if not result.is_slower_than_xla:  # else once more, so that chance does not decide
            break
    return result


def _tried(name: str, failed: dict[str, str], function: Callable[..., Any], *args: Any) -> Any:
    """The result; or None, with the reason in `failed`, such as too little memory."""
    try:
        return function(*args)
    except (RuntimeError, ValueError, MemoryError) as error:  # of XLA, PyTorch and NumPy
        failed[name] = _brief(error)
        return None


def _difference(programs: Mapping[str, Program]) -> float | None:
    if not {JAXGRAD, XLA} <= programs.keys():
        return None
    ours, theirs = (jax.tree.leaves(programs[name].run()[0]) for name in (JAXGRAD, XLA))
    return max(map(_relative_difference, ours, theirs))


def _relative_difference(a: jax.Array, b: jax.Array) -> float:
    a_, b_ = (np.asarray(array, np.float32) for array in (a, b))
    return float(np.linalg.norm(a_ - b_) / np.linalg.norm(b_))


def _brief(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[0]:.200}"
