"""Convolution and transposed convolution: forward, the gradient of the input (dX) and that of the weights (dW)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

import jaxgrad
from benchmarks import environment
from benchmarks.compare import Work, compare
from benchmarks.conv_cases import CASES, QUICK_CASES, Case, parse_case
from benchmarks.report import OURS
from benchmarks.timing import Contender, Effort, jax_contender, torch_contender, why_not_torch

__all__ = ["BASELINE", "CASES", "QUICK_CASES", "measure", "parse_case"]

BASELINE = "jax.lax"
ON_CUDNN = "jaxgrad on cuDNN"
TORCH = "torch"
NOTES = (
    "Cases are batch x sizes, input features -> output features, k the window, s the stride, d the window's dilation, "
    "g the groups, p the padding, causal that all of it stands before the first element, T a transposed convolution, "
    "and the layout.",
    "dX and dW are calls that compute this one gradient.",
    "jaxgrad on cuDNN is what the calls that jaxgrad leaves to XLA would take there, with implementation='cudnn'.",
    "The floor is the larger of two times: of as many operations in large matrix products, and of reading and writing "
    "each array once at the rate of a large addition.",
)


def measure(cases: Sequence[Case], effort: Effort) -> dict[str, Any]:
    """The report, as report.py wants it."""
    left_out = {}
    if (reason := why_not_torch()) is not None:
        left_out[TORCH] = reason
        print(f"left out: {TORCH} ({reason})")
    rows = []
    for case in cases:
        print(case.label, flush=True)
        rows += _rows(case, set(left_out), effort)
    return {
        "op": "conv",
        "environment": environment.describe(),
        "implementation": str(jaxgrad.explain(jaxgrad.conv_general_dilated)),
        "left_out": left_out,
        "notes": NOTES,
        "one_line_a_case": True,
        "rows": rows,
    }


def _rows(case: Case, left_out: set[str], effort: Effort) -> list[dict[str, Any]]:
    arrays = _arrays(case)
    settings = case.settings()
    ours = jaxgrad.conv_transpose if case.transposed else jaxgrad.conv_general_dilated
    theirs = lax.conv_transpose if case.transposed else lax.conv_general_dilated
    taken = str(jaxgrad.explain(ours, *arrays[:2], **settings))
    contenders: dict[str, list[Contender]] = {"forward": [], "dX": [], "dW": []}
    ops = {OURS: ours, BASELINE: theirs}
    if jax.default_backend() == "gpu" and not _refusal_of_cudnn(ours, arrays, settings):
        ops[ON_CUDNN] = partial(ours, implementation="cudnn")
    for name, op in ops.items():
        for which, function in _passes(op, case).items():
            operands = [arrays[i] for i in _OPERANDS[which]]
            if name == ON_CUDNN and _runs_on_cudnn(_passes(ours, case)[which], operands):
                continue  # it is jaxgrad's own
            contenders[which].append(jax_contender(name, function, *operands))
    if TORCH not in left_out:
        from benchmarks import torch_conv

        on_gpu = jax.default_backend() == "gpu"
        for which, (function, outputs) in torch_conv.passes(case, *arrays, on_gpu=on_gpu).items():
            contenders[which].append(torch_contender(TORCH, function, outputs, on_gpu))
    return [{**compare(_work(case, which), those, effort), "taken": taken} for which, those in contenders.items()]


def _refusal_of_cudnn(op: Callable[..., jax.Array], arrays: Sequence[jax.Array], settings: dict[str, Any]) -> str:
    try:
        jaxgrad.explain(op, *arrays[:2], **settings, implementation="cudnn")
    except ValueError as error:  # not all units of this shape have a kernel
        return str(error)
    return ""


def _runs_on_cudnn(function: Callable[..., jax.Array], operands: Sequence[jax.Array]) -> bool:
    return "jaxgrad_cuda_conv" in jax.jit(function).lower(*operands).as_text()


# The operands of each pass, of x, w and dy.
_OPERANDS = {"forward": (0, 1), "dX": (1, 2), "dW": (0, 2)}


def _passes(op: Callable[..., jax.Array], case: Case) -> dict[str, Callable[..., jax.Array]]:
    """Functions of the operands. The op is linear in what it is differentiated by, whose value none of them reads."""
    settings, (x_shape, w_shape, _) = case.settings(), case.shapes()
    return {
        "forward": lambda x, w: op(x, w, **settings),
        "dX": lambda w, dy: jax.vjp(lambda x: op(x, w, **settings), jnp.zeros(x_shape, case.dtype))[1](dy)[0],
        "dW": lambda x, dy: jax.vjp(lambda w: op(x, w, **settings), jnp.zeros(w_shape, case.dtype))[1](dy)[0],
    }


def _work(case: Case, which: str) -> Work:
    itemsize = jnp.dtype(case.dtype).itemsize
    sizes = {name: math.prod(shape) * itemsize for name, shape in zip("xwy", case.shapes(), strict=True)}
    return Work(
        label=case.label,
        measure=which,
        settings=dataclasses.asdict(case),
        dtype=case.dtype,
        flops=case.flops,
        array_bytes=sizes,
        extra=case.extra,
        bytes_moved=sum(sizes.values()),
    )


def _arrays(case: Case) -> tuple[jax.Array, jax.Array, jax.Array]:
    """x, w and dy."""
    keys = jax.random.split(jax.random.key(0), 3)
    x, w, dy = (
        jax.random.normal(key, shape).astype(case.dtype) for key, shape in zip(keys, case.shapes(), strict=True)
    )
    return x, w, dy
