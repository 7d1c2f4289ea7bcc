"""Training steps with and without the choices that `jaxgrad.tune` measures for them."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any
from unittest import mock

import jax

import jaxgrad
from benchmarks.clock import timed
from benchmarks.contender_names import OURS, OURS_TUNED, OURS_WRONG, OURS_WRONG_TUNED
from benchmarks.measuring import measured
from benchmarks.networks import NETWORKS
from benchmarks.networks.initial import describe
from benchmarks.networks.jax_ops import JaxgradOps
from benchmarks.options import Options
from benchmarks.steps import CASES, QUICK_CASES, Case, compared, parse_case
from benchmarks.timing import jax_loop_contenders, raised
from benchmarks.training import arguments, training_step
from jaxgrad._src.choice import table
from jaxgrad._src.conv.on_xla import forms as xla_forms

__all__ = ["CASES", "CONTENDERS", "QUICK_CASES", "measure", "parse_case"]

CONTENDERS = (OURS, OURS_TUNED, OURS_WRONG, OURS_WRONG_TUNED)
WRONG_TABLE = (
    "The wrong table prefers XLA where jaxgrad's prefers a kernel, a kernel where it prefers XLA, and on a CPU oneDNN "
    "and jaxgrad's depthwise kernel in place of each other."
)
NOTES = (
    "Cases are those of the training steps, with all ops of jaxgrad.",
    "jaxgrad selects by its table of preferences; jaxgrad, tuned by what jaxgrad.tune measured for the step before.",
    WRONG_TABLE,
)
# The choices of the wrong table where they are not XLA. "cpu" is oneDNN or jaxgrad's depthwise kernel; other rows say
# which.
_WRONG_CHOICE = {
    "cpu": {"xla": "cpu", "onednn": "depthwise", "depthwise": "onednn"},
    "cuda": {"xla": "cudnn"},
}


def measure(cases: Sequence[Case], options: Options) -> dict[str, Any]:
    """The report (report.py)."""
    explanation = jaxgrad.explain(jaxgrad.conv_general_dilated)
    return measured("tuned", cases, lambda case: [_row(case, options)], [explanation], NOTES)


def _row(case: Case, options: Options) -> dict[str, Any]:
    network = NETWORKS[case.network]
    described = describe(network.run, case.x)
    args = arguments(network, described, case.x)
    step = partial(training_step, JaxgradOps, network)
    in_force = measured_contexts(step, args, options)
    made = partial(jax_loop_contenders, dict.fromkeys(in_force, step), *args, in_force=in_force)
    found = raised(timed(f"{', '.join(in_force)}: ready", made))
    return compared(case, described.flops, args[0], found, options)


def measured_contexts(
    function: Callable[..., Any], args: Sequence[Any], options: Options
) -> dict[str, Callable[[], AbstractContextManager[None]]]:
    """By contender, the context in which the function is lowered: a table, and what `jaxgrad.tune` measured."""
    found: dict[str, Callable[[], AbstractContextManager[None]]] = {}
    for plain, tuned, table_in_force in (
        (OURS, OURS_TUNED, contextlib.nullcontext),
        (OURS_WRONG, OURS_WRONG_TUNED, _wrong_table),
    ):
        if options.wants(plain):
            found[plain] = table_in_force
        if options.wants(tuned):
            with table_in_force():
                tuning = timed(f"{tuned}: measured", partial(jaxgrad.tune, function, *args, progress=False))
            print(tuning)
            found[tuned] = partial(_table_and_tuning, table_in_force, tuning)
    return found


@contextlib.contextmanager
def _table_and_tuning(
    table_in_force: Callable[[], AbstractContextManager[None]], tuning: jaxgrad.Tuning
) -> Iterator[None]:
    with table_in_force(), tuning:
        yield


@contextlib.contextmanager
def _wrong_table() -> Iterator[None]:
    right = table.rows

    def wrong_row(platform: str, row: table.Row) -> table.Row:
        if row.op == xla_forms.OP:  # jaxgrad.tune does not measure the forms of a pass on XLA
            return row
        return dataclasses.replace(row, prefer=_WRONG_CHOICE[platform].get(row.prefer, "xla"))

    def wrong(platform: str) -> tuple[table.Row, ...]:
        return tuple(wrong_row(platform, row) for row in right(platform))

    jax.clear_caches()  # what was selected before
    with mock.patch.object(table, "rows", wrong):
        yield
    jax.clear_caches()
