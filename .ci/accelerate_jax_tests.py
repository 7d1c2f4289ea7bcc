"""The pytest plugin of .ci/jax_tests: accelerates every test and counts what computes its convolutions and poolings.

An equation counts once for each time that it is lowered, so those that JAX finds in a cache do not count again.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jaxgrad
from jaxgrad._src.accelerate import lowering
from jaxgrad._src.core import jax_internals, marks
from jaxgrad._src.pool import equation as pool_equation

REQUIRED_SHARE = 0.9  # of the equations that a pass supports, when kernels are forced

TAKEN = "taken by a kernel"
REWRITTEN = "rewritten for XLA, which is faster"
LEFT = "left to XLA"
UNMARKED = "without a mark"
NO_PASS = "with strides and dilations, or a padding, that no pass has"
UNSUPPORTED = "not supported"

_counts: Counter[tuple[str, str]] = Counter()  # by what becomes of an equation, and by pass or reason


def pytest_addoption(parser: pytest.Parser) -> None:
    choices = ("auto", "onednn", "cpu", "cudnn", "cuda", "off")
    parser.addoption("--accelerate", choices=choices, default="auto", help="implementation of jaxgrad.accelerate")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("accelerate") == "off":
        return
    jaxgrad.config.update(search="heuristic")  # timing cuDNN's engines takes longer than the tests themselves
    lowering._lower = _counting_rule(lowering._lower)
    lowering.plan_equation = _counting_plan(lowering.plan_equation)
    if problem := lowering.install():
        raise pytest.UsageError(problem)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    chosen = item.config.getoption("accelerate")
    off = chosen == "off"
    with nullcontext() if off else jaxgrad.accelerate(implementation=None if chosen == "auto" else chosen):
        yield


def pytest_sessionfinish(session: pytest.Session) -> None:
    if (output := getattr(session.config, "workeroutput", None)) is not None:
        output["equations"] = [(*key, number) for key, number in _counts.items()]
    elif session.config.getoption("accelerate") in ("onednn", "cudnn") and _share() < REQUIRED_SHARE:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Adds the counts of a process of pytest-xdist."""
    for outcome, detail, number in getattr(node, "workeroutput", {}).get("equations", ()):
        _counts[outcome, detail] += number


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    if (chosen := config.getoption("accelerate")) == "off":
        return
    terminalreporter.section(f"equations with --accelerate={chosen}, jax {jax.__version__}")
    for outcome in (TAKEN, REWRITTEN, LEFT, UNMARKED, NO_PASS, UNSUPPORTED):
        terminalreporter.line(f"{_total(outcome):7} {outcome}")
        for (found, detail), number in _counts.most_common():
            if found == outcome and detail:
                terminalreporter.line(f"{number:15} {detail}")
    terminalreporter.line(f"{_share():.2%} of the equations that a pass supports were taken by a kernel")
    terminalreporter.line(f"{_share(NO_PASS):.2%} of those and the ones that no pass has")


def _total(*outcomes: str) -> int:
    return sum(number for (outcome, _), number in _counts.items() if outcome in outcomes)


def _share(*others: str) -> float:
    return _total(TAKEN) / max(1, _total(TAKEN, REWRITTEN, LEFT, UNMARKED, *others))


def _counting_rule(rule: jax_internals.Function) -> jax_internals.Function:
    """Counts the equations that `rule` does not plan. Those that a pass itself consists of are exempt."""

    def count(primitive: Any, original: Any, platform: str, context: Any, *operands: Any, **parameters: Any) -> Any:
        mark = marks.mark_in(jax_internals.metadata(context))
        if mark is None:
            unsupported = _unsupported(primitive, parameters, (*context.avals_in, *context.avals_out), platform)
            _counts[UNSUPPORTED if unsupported else UNMARKED, unsupported] += 1
        elif mark != marks.EXEMPT and jax_internals.needs_rule_of_jax(context):
            _counts[LEFT, "JAX cannot partition it"] += 1
        return rule(primitive, original, platform, context, *operands, **parameters)

    return count


def _counting_plan(plan_equation: jax_internals.Function) -> jax_internals.Function:
    def count(
        primitive: Any, parameters: Any, avals: Any, platform: str, implementation: str | None, partitioned: bool
    ) -> Any:
        plan = plan_equation(primitive, parameters, avals, platform, implementation, partitioned)
        if plan.compute is not None:
            outcome = REWRITTEN if plan.implementation == "xla" else TAKEN
            _counts[outcome, f"{plan.pass_name} on {plan.implementation}"] += 1
        elif unsupported := _unsupported(primitive, parameters, avals, platform):
            _counts[UNSUPPORTED, unsupported] += 1
        else:
            reason = re.sub(r"only \d+ ", "few ", f"{plan.pass_name}: {plan.reason}".removeprefix(": "))
            _counts[LEFT if plan.pass_name else NO_PASS, reason] += 1
        return plan

    return count


def _unsupported(primitive: Any, parameters: Any, avals: Any, platform: str) -> str:
    """Why no kernel supports an equation, by its shapes and dtypes; empty if one may."""
    if primitive in pool_equation.PRIMITIVES:
        read = pool_equation.read_equation(primitive, parameters, avals)
        return f"pooling: {read}" if isinstance(read, str) else ""
    lhs, rhs, result = avals
    dtypes = {aval.dtype.name: aval.dtype for aval in avals}
    if not all(jnp.issubdtype(dtype, jnp.floating) for dtype in dtypes.values()):
        return "dtype: complex or integer"
    if platform == "cpu" and result.dtype == jnp.float64:
        return "dtype: float64 on the CPU"
    if lhs.dtype != rhs.dtype or (result.dtype != lhs.dtype and result.dtype.itemsize <= lhs.dtype.itemsize):
        return f"dtype: a mixture, {lhs.dtype.name} x {rhs.dtype.name} -> {result.dtype.name}"
    if not 1 <= lhs.ndim - 2 <= 3:
        return "shape: 0 or more than 3 spatial dimensions"
    if 0 in (*lhs.shape, *rhs.shape, *result.shape):
        return "shape: an empty array"
    return ""
