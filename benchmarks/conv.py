"""Convolution and transposed convolution: forward, input gradient (dX) and weight gradient (dW)."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

import jaxgrad
from benchmarks import lax_variants, matrix_product, torch_peers
from benchmarks.compare import Work, compare
from benchmarks.contender_names import (
    BEST_FLAGS,
    LAX,
    LAX_DILATED,
    LAX_PADDED,
    MATRIX_PRODUCT,
    OURS,
    OURS_ON_CUDNN,
    OURS_ON_ONEDNN,
    TORCH_COMPILED,
    TORCH_EAGER,
)
from benchmarks.conv_cases import CASES, QUICK_CASES, Case, parse_case
from benchmarks.measuring import measured
from benchmarks.options import Options
from benchmarks.timing import Call, Contender, jax_contenders, torch_contender
from jaxgrad._src.tuning.timing import random_operands

__all__ = ["CASES", "CONTENDERS", "QUICK_CASES", "measure", "parse_case"]

_TORCH = (TORCH_EAGER, TORCH_COMPILED)
# By platform, the implementation of a vendor, and its targets in a program, of which those of cuDNN have had two names.
_VENDOR = {
    "gpu": (OURS_ON_CUDNN, "cudnn", "jaxgrad_(cuda|cudnn)_conv"),
    "cpu": (OURS_ON_ONEDNN, "onednn", "jaxgrad_onednn_conv"),
}
_LAX = (LAX, LAX_PADDED, LAX_DILATED)
_FLAGGED = tuple(name + BEST_FLAGS for name in _LAX)
CONTENDERS = (OURS, *_LAX, *_FLAGGED, OURS_ON_CUDNN, OURS_ON_ONEDNN, *_TORCH, MATRIX_PRODUCT)
NOTES = (
    "Cases are batch x sizes, input features -> output features, k the window, s the stride, d the window's dilation, "
    "g the groups, p the padding at both ends, causal padding before the first element alone, T a transposed "
    "convolution, and the layout.",
    "forward, dX (input gradient) and dW (weight gradient) are separate calls.",
    "jax.lax after jnp.pad pads causal convolutions with jnp.pad first, as Flax does.",
    "jax.lax after lax.pad dilates and pads the input of transposed convolutions with lax.pad first.",
    "best flags are those of lax_variants.py, on a CPU.",
    "jaxgrad on cuDNN is implementation='cudnn', and on oneDNN 'onednn', for calls that run elsewhere in jaxgrad.",
    "matrix product is the pass as one jax.lax.dot_general, for the cases of matrix_product.has_product. Rearranging "
    "the operands and the result is not timed.",
    "torch, compiled is torch.compile of the same call in its default mode.",
    "On a CPU the process keeps the memory that it frees (memory.py), so that calls do not wait for page faults.",
    "floor_ms is the larger of two times: the same operations as large matrix products, those of depthwise "
    "convolutions as float32 multiply-adds, and reading and writing each array once at the rate of a large addition.",
)


def measure(cases: Sequence[Case], options: Options) -> dict[str, Any]:
    """The report (report.py)."""
    left_out = torch_peers.left_out(_TORCH, options) | lax_variants.left_out(_FLAGGED, options)
    explanation = jaxgrad.explain(jaxgrad.conv_general_dilated)
    rows_of = partial(_rows, left_out=left_out, options=options)
    return measured("conv", cases, rows_of, [explanation], NOTES, left_out, one_line_a_case=True)


def _rows(case: Case, left_out: dict[str, str], options: Options) -> list[dict[str, Any]]:
    arrays = make_arrays(case)
    settings = case.settings()
    ours = jaxgrad.conv_transpose if case.transposed else jaxgrad.conv_general_dilated
    theirs = lax.conv_transpose if case.transposed else lax.conv_general_dilated
    taken = str(jaxgrad.explain(ours, *arrays[:2], **settings))
    of_lax = {LAX: theirs}
    if case.causal:
        of_lax[LAX_PADDED] = _padded_first
    if case.transposed and case.stride > 1:
        of_lax[LAX_DILATED] = theirs
    ops = {OURS: ours}
    ops |= {name: of_lax[name.removesuffix(BEST_FLAGS)] for name in lax_variants.with_flags(of_lax, left_out)}
    vendor, implementation, targets = _VENDOR[jax.default_backend()]
    if _has_all_passes(implementation, ours, arrays, settings):
        ops[vendor] = partial(ours, implementation=implementation)
    calls: list[tuple[str, Call]] = []  # with their passes
    for name, op in ops.items():
        if not options.wants(name):
            continue
        for which, function in passes(op, case).items():
            if name == vendor and _calls(targets, passes(ours, case)[which], arrays):
                continue  # the same program as jaxgrad's
            calls.append((which, Call(name, function, arrays, lax_variants.context_of(name))))
    products = {}
    if options.wants(MATRIX_PRODUCT) and matrix_product.has_product(case):
        products = matrix_product.products(case, *arrays)
        calls += [(which, Call(MATRIX_PRODUCT, each.function, each.operands)) for which, each in products.items()]
    contenders: dict[str, list[Contender]] = {"forward": [], "dX": [], "dW": []}
    for (which, _), contender in zip(calls, jax_contenders([call for _, call in calls]), strict=True):
        if contender.name == MATRIX_PRODUCT:
            restored = [products[which].restored(result) for result in contender.outputs]
            contender = dataclasses.replace(contender, outputs=restored)
        contenders[which].append(contender)
    for name in _TORCH:
        if options.wants(name) and name not in left_out:
            for which, contender in _torch_contenders(name, case, arrays, options, left_out).items():
                contenders[which].append(contender)
    return [
        {**compare(work_of(case, which), those, options.effort), "taken": taken} for which, those in contenders.items()
    ]


def _torch_contenders(
    name: str, case: Case, arrays: Sequence[jax.Array], options: Options, left_out: dict[str, str]
) -> dict[str, Contender]:
    """One for each pass, but for those that torch.compile fails for."""
    torch_peers.forget()
    found = {}
    for which, (function, outputs) in torch_peers.passes(case.call, arrays).items():
        run = torch_peers.compiled(function) if name == TORCH_COMPILED else function

        def make(run: Any = run, outputs: Any = outputs) -> Contender:
            return torch_contender(name, run, outputs(run))

        where = f"{case.label}, {which}"
        made = torch_peers.compiled_contender(make, where, options, left_out) if name == TORCH_COMPILED else make()
        if made is not None:
            found[which] = made
    return found


def _padded_first(x: jax.Array, w: jax.Array, **settings: Any) -> jax.Array:
    """jnp.pad, then a convolution without padding."""
    spatial = [axis for axis, name in enumerate(settings["dimension_numbers"][0]) if name not in "NC"]
    pads = dict(zip(spatial, settings["padding"], strict=True))
    padded = jnp.pad(x, [pads.get(axis, (0, 0)) for axis in range(x.ndim)])
    return lax.conv_general_dilated(padded, w, **{**settings, "padding": "VALID"})


def _has_all_passes(
    implementation: str, op: Callable[..., jax.Array], arrays: Sequence[jax.Array], settings: dict[str, Any]
) -> bool:
    try:
        jaxgrad.explain(op, *arrays[:2], **settings, implementation=implementation)
    except ValueError:
        return False
    return True


def _calls(targets: str, function: Callable[..., jax.Array], operands: Sequence[jax.Array]) -> bool:
    """Whether the program calls one of the targets, a regular expression."""
    return re.search(targets, jax.jit(function).lower(*operands).as_text()) is not None


def passes(op: Callable[..., jax.Array], case: Case) -> dict[str, Callable[..., jax.Array]]:
    """Functions of x, w and dy, each of two of them: the op is linear, and compiled programs drop the third."""
    layer = partial(op, **case.settings())
    return {torch_peers.MEASURES.get(each.name, each.name): each.of(layer) for each in case.call.passes}


def work_of(case: Case, which: str) -> Work:
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
        is_product=not case.is_depthwise,
    )


def make_arrays(case: Case) -> tuple[jax.Array, jax.Array, jax.Array]:
    """x, w and dy."""
    ((x, w, dy),) = random_operands(case.call.operands(), one_call_a_program=True)
    return x, w, dy
