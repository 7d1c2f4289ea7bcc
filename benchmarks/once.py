"""`python -m benchmarks once` makes each call of some cases once, for a profiler of kernels.

The calls are those that `python -m benchmarks conv` and `gru` time: the passes of a convolution, and a GRU with its
gradients, without and with `linear_before_reset`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import jax

import jaxgrad
from benchmarks import conv, gru
from benchmarks.contender_names import OURS


def run(op: str, match: re.Pattern[str]) -> None:
    """Makes the calls of the cases of "conv" or "gru" whose labels match, and prints their names."""
    every = {"conv": conv, "gru": gru}[op].CASES[jax.default_backend()]
    cases = [case for case in every if match.search(case.label)]
    if not cases:
        raise SystemExit(f"no case matches {match.pattern}")
    for case in cases:
        for what, function, operands in _calls(case):
            with jax.default_matmul_precision(getattr(case, "precision", "default")):
                jax.block_until_ready(jax.jit(function)(*operands))
            print(f"{case.label} {what}", flush=True)


def _calls(case: Any) -> Iterator[tuple[str, Callable[..., Any], tuple[Any, ...]]]:
    """Names, functions and their arguments."""
    if isinstance(case, gru.Case):
        for (lbr, which, name), (function, args) in gru.functions(case, *gru.arrays(case)).items():
            if name == OURS and which != "forward":  # the other one has the forward pass too
                yield f"lbr={int(lbr)}", function, args
        return
    arrays = conv.make_arrays(case)
    op = jaxgrad.conv_transpose if case.transposed else jaxgrad.conv_general_dilated
    for which, function in conv.passes(op, case).items():
        yield which, function, arrays
