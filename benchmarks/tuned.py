"""Training steps, and single calls with their gradients, with and without what `jaxgrad.tune` measures for them."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any
from unittest import mock

import jax

import jaxgrad
from benchmarks import conv, gru, norm, steps
from benchmarks.compare import Work, compare
from benchmarks.contender_names import OURS, OURS_TUNED, OURS_WRONG, OURS_WRONG_TUNED
from benchmarks.measuring import measured
from benchmarks.networks import NETWORKS
from benchmarks.networks.initial import describe
from benchmarks.networks.jax_ops import JaxgradOps
from benchmarks.options import Options
from benchmarks.timing import Call, jax_contenders, jax_loop_contenders, jax_queued_contenders, raised, timed
from benchmarks.training import arguments, training_step
from jaxgrad._src.bench.call import value_and_gradients
from jaxgrad._src.choice import table
from jaxgrad._src.conv.on_xla import forms as xla_forms

CONTENDERS = (OURS, OURS_TUNED, OURS_WRONG, OURS_WRONG_TUNED)
NOTES = (
    "Cases are those of the training steps, with all ops of jaxgrad, and of calls of convolutions, of "
    "norms and of the GRU with linear_before_reset. A call computes the result and all gradients.",
    "jaxgrad selects by its table of preferences; jaxgrad, tuned by what jaxgrad.tune measured before.",
    "The wrong table prefers XLA where jaxgrad's prefers a kernel, and a kernel where it prefers XLA.",
)
_OPS = {"conv": conv, "norm": norm, "gru": gru}
_BACKWARD = "forward+backward"


@dataclasses.dataclass(frozen=True)
class CallCase:
    """A case of the benchmark of an op."""

    op: str
    call: Any

    @property
    def label(self) -> str:
        return f"{self.op} {self.call.label}"


Case = steps.Case | CallCase
CASES: dict[str, tuple[Case, ...]] = {
    platform: (
        *steps.CASES[platform],
        *(CallCase(op, case) for op, module in _OPS.items() for case in module.CASES[platform]),
    )
    for platform in ("cpu", "gpu")
}
QUICK_CASES: tuple[Case, ...] = (
    steps.QUICK_CASES[0],
    *(CallCase(op, module.QUICK_CASES[0]) for op, module in _OPS.items()),
)


def parse_case(text: str) -> Case:
    """a case of steps; or conv, norm or gru, a colon, and a case of that benchmark, as in gru:100,32,64,128"""
    op, colon, case = text.partition(":")
    if not colon:
        return steps.parse_case(text)
    if op not in _OPS:
        raise argparse.ArgumentTypeError(f"must be {parse_case.__doc__}, got {text!r}")
    return CallCase(op, _OPS[op].parse_case(case))


def measure(cases: Sequence[Case], options: Options) -> dict[str, Any]:
    """The report (report.py)."""
    explanations = map(jaxgrad.explain, (jaxgrad.conv_general_dilated, jaxgrad.batch_norm_training, jaxgrad.gru))

    def rows_of(case: Case) -> list[dict[str, Any]]:
        return [_row_of_call(case, options) if isinstance(case, CallCase) else _row_of_step(case, options)]

    return measured("tuned", cases, rows_of, explanations, NOTES)


def _row_of_call(case: CallCase, options: Options) -> dict[str, Any]:
    function, args, precision = _function(case)
    with jax.default_matmul_precision(precision):
        in_force = measured_contexts(function, args, options)
        contenders = jax_queued_contenders if case.op == "gru" else jax_contenders
        found = contenders([Call(name, function, args, context) for name, context in in_force.items()])
    return compare(_work(case), found, options.effort)


def _function(case: CallCase) -> tuple[Callable[..., Any], tuple[Any, ...], str]:
    """The function of a call and its gradients, its arguments, and the precision of matrix products."""
    if case.op == "conv":
        op = jaxgrad.conv_transpose if case.call.transposed else jaxgrad.conv_general_dilated
        *operands, dy = conv.make_arrays(case.call)
        return _gradients(partial(op, **case.call.settings())), (tuple(operands), dy), "default"
    if case.op == "norm":
        *operands, dy = norm.make_arrays(case.call)
        return _gradients(case.call.layer()), (tuple(operands), dy), "default"
    functions = gru.functions(case.call, *gru.arrays(case.call))
    return *functions[True, _BACKWARD, OURS], case.call.precision


def _gradients(layer: Callable[..., jax.Array]) -> Callable[..., Any]:
    """y, and the gradients of sum(y dy) with respect to the inputs."""

    def run(inputs: tuple[jax.Array, ...], dy: jax.Array) -> tuple[jax.Array, ...]:
        return value_and_gradients(layer, len(inputs))(*inputs, dy)

    return run


def _work(case: CallCase) -> Work:
    """The work of the benchmark of the op, under the name of the case here."""
    if case.op == "gru":
        work = gru.work_of(case.call, linear_before_reset=True, which=_BACKWARD)
    elif case.op == "norm":
        work = case.call.work(_BACKWARD)
    else:
        one = conv.work_of(case.call, "forward")
        work = dataclasses.replace(one, measure=_BACKWARD, flops=3 * one.flops, bytes_moved=3 * one.bytes_moved)
    extra = work.extra or case.op != "conv"
    return dataclasses.replace(work, label=case.label, settings=dataclasses.asdict(case), extra=extra)


def _row_of_step(case: steps.Case, options: Options) -> dict[str, Any]:
    network = NETWORKS[case.network]
    described = describe(network.run, case.x)
    args = arguments(network, described, case.x)
    step = partial(training_step, JaxgradOps, network)
    in_force = measured_contexts(step, args, options)
    made = partial(jax_loop_contenders, dict.fromkeys(in_force, step), *args, in_force=in_force)
    found = raised(timed(f"{', '.join(in_force)}: ready", made))
    return steps.compared(case, described.flops, args[0], found, options)


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
        kernel = "cudnn" if platform == "cuda" else "onednn" if row.op == "conv" else "cpu"
        return dataclasses.replace(row, prefer=kernel if row.prefer == "xla" else "xla")

    def wrong(platform: str) -> tuple[table.Row, ...]:
        return tuple(wrong_row(platform, row) for row in right(platform))

    jax.clear_caches()  # what was selected before
    with mock.patch.object(table, "rows", wrong):
        yield
    jax.clear_caches()
