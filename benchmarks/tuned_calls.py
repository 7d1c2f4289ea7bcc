"""Single calls with their gradients, with and without the choices that `jaxgrad.tune` measures for them."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax

import jaxgrad
from benchmarks import batch_norm, conv, gru, tuned
from benchmarks.compare import Work, compare
from benchmarks.contender_names import OURS
from benchmarks.measuring import measured
from benchmarks.options import Options
from benchmarks.timing import Call, jax_contenders, jax_queued_contenders

__all__ = ["CASES", "CONTENDERS", "QUICK_CASES", "measure", "parse_case"]

CONTENDERS = tuned.CONTENDERS
NOTES = (
    "Cases are those of convolutions, of batch normalization and of the GRU with linear_before_reset. A call computes "
    "the result and the gradients of all operands.",
    "jaxgrad selects by its table of preferences; jaxgrad, tuned by what jaxgrad.tune measured for the call before.",
    tuned.WRONG_TABLE,
)
_OPS = {"conv": conv, "batch_norm": batch_norm, "gru": gru}
_BACKWARD = "forward+backward"


@dataclasses.dataclass(frozen=True)
class Case:
    """A case of the benchmark of an op."""

    op: str
    call: Any

    @property
    def label(self) -> str:
        return f"{self.op} {self.call.label}"


CASES = {
    platform: tuple(Case(op, case) for op, module in _OPS.items() for case in module.CASES[platform])
    for platform in ("cpu", "gpu")
}
QUICK_CASES = tuple(Case(op, module.QUICK_CASES[0]) for op, module in _OPS.items())


def parse_case(text: str) -> Case:
    """conv, batch_norm or gru, a colon, and a case of that benchmark, as in gru:100,32,64,128"""
    op, colon, case = text.partition(":")
    if not colon or op not in _OPS:
        raise argparse.ArgumentTypeError(f"must be {parse_case.__doc__}, got {text!r}")
    return Case(op, _OPS[op].parse_case(case))


def measure(cases: Sequence[Case], options: Options) -> dict[str, Any]:
    """The report (report.py)."""
    explanations = map(jaxgrad.explain, (jaxgrad.conv_general_dilated, jaxgrad.batch_norm_training, jaxgrad.gru))
    return measured("tuned_calls", cases, lambda case: [_row(case, options)], explanations, NOTES)


def _row(case: Case, options: Options) -> dict[str, Any]:
    function, args, precision = _function(case)
    with jax.default_matmul_precision(precision):
        in_force = tuned.measured_contexts(function, args, options)
        contenders = jax_queued_contenders if case.op == "gru" else jax_contenders
        found = contenders([Call(name, function, args, context) for name, context in in_force.items()])
    return compare(_work(case), found, options.effort)


def _function(case: Case) -> tuple[Callable[..., Any], tuple[Any, ...], str]:
    """The function of a call and its gradients, its arguments, and the precision of matrix products."""
    if case.op == "conv":
        op = jaxgrad.conv_transpose if case.call.transposed else jaxgrad.conv_general_dilated
        *operands, dy = conv.make_arrays(case.call)
        return batch_norm.gradients(partial(op, **case.call.settings())), (tuple(operands), dy), "default"
    if case.op == "batch_norm":
        return batch_norm.gradients(batch_norm.layer_of(case.call)), batch_norm.arrays_of(case.call), "default"
    functions = gru.functions(case.call, *gru.arrays(case.call))
    return *functions[True, _BACKWARD, OURS], case.call.precision


def _work(case: Case) -> Work:
    """The work of the benchmark of the op, under the name of the case here."""
    if case.op == "gru":
        work = gru.work_of(case.call, linear_before_reset=True, which=_BACKWARD)
    elif case.op == "batch_norm":
        work = batch_norm.work_of(case.call, _BACKWARD)
    else:
        one = conv.work_of(case.call, "forward")
        work = dataclasses.replace(one, measure=_BACKWARD, flops=3 * one.flops, bytes_moved=3 * one.bytes_moved)
    extra = work.extra or case.op != "conv"
    return dataclasses.replace(work, label=case.label, settings=dataclasses.asdict(case), extra=extra)
