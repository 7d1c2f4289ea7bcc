"""Whole training steps of recurrent networks: loss, gradients and momentum, in one jitted call.

"ppo" is an update of recurrent PPO on one rollout, whose episodes end inside it; "char-lm" a language model of
characters with two layers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax

import jaxgrad
from benchmarks import case_text, torch_peers
from benchmarks.compare import Work, agreeing, compare, precision_in_use
from benchmarks.contender_names import OURS, SCAN, SCAN_CELL, TORCH_EAGER
from benchmarks.measuring import measured
from benchmarks.options import Options
from benchmarks.recurrent_models import LAYERS, MODELS, arguments, training_step
from benchmarks.timing import Contender, jax_loop_contenders, torch_queued_contender, tried

_LAYERS = {OURS: "jaxgrad", SCAN: "scan", SCAN_CELL: "cell"}
CONTENDERS = (*_LAYERS, TORCH_EAGER)
NOTES = (
    "Cases are T,B,H: steps, batch and hidden units. ppo has a GRU with resets between dense layers; char-lm has two "
    "GRU layers between an embedding and a dense layer. benchmarks/recurrent_models.py defines them.",
    "A step is the loss, all gradients and SGD with momentum, in place.",
    "lax.scan of a flax cell multiplies the input of each step inside the loop, as a scanned GRUCell of flax; jax.grad "
    "of lax.scan multiplies the inputs of all steps before it.",
)
# Limits of ||a - b|| / ||b|| of the loss, and of each parameter and gradient.
_TOLERANCES = {"float32": (1e-4, 1e-2), "TF32": (3e-3, 5e-2), "bfloat16": (2e-2, 0.2)}


@dataclasses.dataclass(frozen=True)
class Case:
    model: str
    T: int
    B: int
    H: int
    dtype: str = "float32"
    extra: bool = False

    @property
    def label(self) -> str:
        return f"{self.model} {self.T},{self.B},{self.H}" + (" bf16" if self.dtype == "bfloat16" else "")


CASES = {
    "cpu": (
        Case("ppo", 128, 4, 128),
        Case("ppo", 128, 64, 128),
        Case("char-lm", 256, 64, 512),
    ),
    "gpu": tuple(
        Case(model, *sizes, dtype)
        for dtype in ("float32", "bfloat16")
        for model, *sizes in (("ppo", 128, 2048, 128), ("char-lm", 256, 64, 512), ("ppo", 128, 64, 128))
    ),
}
QUICK_CASES = (Case("ppo", 9, 3, 16), Case("char-lm", 8, 2, 16), Case("ppo", 9, 3, 16, "bfloat16"))


def parse_case(text: str) -> Case:
    """model,T,B,H or model,T,B,H,bf16; models are ppo and char-lm"""
    model, sizes, dtype = case_text.parse(text, MODELS, 3, parse_case.__doc__)
    return Case(model, *sizes, dtype)


def measure(cases: Sequence[Case], options: Options) -> dict[str, Any]:
    """The report (report.py)."""
    left_out = torch_peers.left_out((TORCH_EAGER,), options)
    explanation = jaxgrad.explain(jaxgrad.gru)
    return measured("recurrent", cases, lambda case: [_row(case, left_out, options)], [explanation], NOTES, left_out)


def _row(case: Case, left_out: dict[str, str], options: Options) -> dict[str, Any]:
    model = MODELS[case.model]
    args = arguments(model, case.T, case.B, case.H, case.dtype)
    work = Work(
        label=case.label,
        measure="training step",
        settings=dataclasses.asdict(case),
        dtype=case.dtype,
        flops=model.flops(case.T, case.B, case.H),
        array_bytes={"parameters": sum(leaf.nbytes for leaf in jax.tree.leaves(args[0].params))},
        extra=case.extra,
    )
    loss, array = _TOLERANCES[precision_in_use(case.dtype)]
    tolerances = [*[array] * len(jax.tree.leaves(args[0])), loss]
    steps = {
        name: partial(training_step, model, LAYERS[layer]) for name, layer in _LAYERS.items() if options.wants(name)
    }
    contenders = dict(zip(steps, jax_loop_contenders(steps, *args), strict=True))
    if case.model == "char-lm" and TORCH_EAGER not in left_out and options.wants(TORCH_EAGER):
        contenders[TORCH_EAGER] = tried(_torch_contender, *args)
    found = agreeing(work, contenders, case.label, left_out, tolerances)
    return compare(work, found, options.effort, tolerances)


def _torch_contender(state: Any, *batch: Any) -> Contender:
    from benchmarks import torch_char_lm

    step, outputs, peak_bytes = torch_char_lm.training_step(state, *batch)
    contender = torch_queued_contender(TORCH_EAGER, step, outputs)
    return dataclasses.replace(contender, peak_bytes=peak_bytes)
