"""Per-example gradients of a small convolutional classifier, by `vmap(grad)`."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
from jax import lax

import jaxgrad
from benchmarks import lax_variants
from benchmarks.compare import Work, compare
from benchmarks.contender_names import BEST_FLAGS, LAX, LAX_LOOPED, OURS, OURS_LOOPED
from benchmarks.measuring import measured
from benchmarks.options import Options
from benchmarks.timing import Call, jax_queued_contenders

_FLAGGED = (LAX + BEST_FLAGS, LAX_LOOPED + BEST_FLAGS)
CONTENDERS = (OURS, OURS_LOOPED, LAX, LAX_LOOPED, *_FLAGGED)
NOTES = (
    "Cases are the batch, the size of its square images of 3 channels, and the features of the first of three 3x3 "
    "convolutions, whose others have twice as many and strides of 2.",
    "jaxgrad and jax.lax are vmap(grad) of the loss of one example; in lax.map is a loop over the examples.",
    "best flags are those of lax_variants.py, on a CPU.",
    "floor_ms is the time of the same operations as large matrix products.",
)
_STRIDES, _CLASSES = (1, 2, 2), 10
# Limit of ||a - b|| / ||b||: where TF32 rounds an activation to the other side of zero, its whole gradient changes.
_TF32_TOLERANCE = 0.1
_LAST = ("NHWC", "HWIO", "NHWC")


@dataclasses.dataclass(frozen=True)
class Case:
    """A batch of square images, and the features of the first layer."""

    batch: int
    size: int
    features: int

    @property
    def label(self) -> str:
        return f"{self.batch}x{self.size}x{self.size}, {self.features} features"

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """The shapes of the parameters: the weights of the convolutions and of the classifier."""
        f = self.features
        return [(3, 3, 3, f), (3, 3, f, 2 * f), (3, 3, 2 * f, 2 * f), (2 * f, _CLASSES)]

    @property
    def flops(self) -> int:
        """Of the convolutions: forward, weight gradient, and input gradient of all but the first."""
        total, size = 0, self.size
        for i, (shape, stride) in enumerate(zip(self.shapes, _STRIDES, strict=False)):
            size = -(-size // stride)
            total += 2 * self.batch * size**2 * int(np.prod(shape)) * (3 if i else 2)
        return total


CASES = {
    "cpu": (Case(32, 8, 8), Case(16, 16, 8), Case(64, 28, 8), Case(32, 32, 16), Case(16, 32, 32)),
    "gpu": (
        Case(256, 8, 16),
        Case(64, 28, 8),
        Case(256, 32, 16),
        Case(256, 32, 32),
        Case(64, 64, 64),
        Case(16, 224, 64),
    ),
}
QUICK_CASES = (Case(3, 6, 2),)


def parse_case(text: str) -> Case:
    """batch,size,features"""
    sizes = text.split(",")
    if len(sizes) != 3 or not all(size.isdecimal() and int(size) > 0 for size in sizes):
        raise argparse.ArgumentTypeError(f"must be {parse_case.__doc__}, got {text!r}")
    return Case(*map(int, sizes))


def measure(cases: Sequence[Case], options: Options) -> dict[str, Any]:
    """The report (report.py)."""
    explanation = jaxgrad.explain(jaxgrad.conv_general_dilated)
    left_out = lax_variants.left_out(_FLAGGED, options)
    return measured("per_example", cases, lambda case: [_row(case, left_out, options)], [explanation], NOTES, left_out)


def _row(case: Case, left_out: dict[str, str], options: Options) -> dict[str, Any]:
    args = jax.device_put(arrays(case))
    functions = {OURS: gradients(jaxgrad.conv_general_dilated), OURS_LOOPED: _looped(jaxgrad.conv_general_dilated)}
    of_lax = {LAX: gradients(lax.conv_general_dilated), LAX_LOOPED: _looped(lax.conv_general_dilated)}
    functions |= {name: of_lax[name.removesuffix(BEST_FLAGS)] for name in lax_variants.with_flags(of_lax, left_out)}
    calls = [Call(name, function, args) for name, function in functions.items() if options.wants(name)]
    contenders = jax_queued_contenders(calls)
    work = Work(
        label=case.label,
        measure="per-example gradients",
        settings=dataclasses.asdict(case),
        dtype="float32",
        flops=case.flops,
        array_bytes={"gradients": 4 * case.batch * sum(int(np.prod(shape)) for shape in case.shapes)},
    )
    tolerance = _TF32_TOLERANCE if jax.default_backend() == "gpu" else None
    return compare(work, contenders, options.effort, tolerance and [tolerance] * len(contenders[0].outputs))


def gradients(conv: Callable[..., Any]) -> Callable[..., Any]:
    """A function of the arrays of a case: the gradients of the loss of each example."""
    return jax.vmap(jax.grad(partial(_loss, conv)), in_axes=(None, 0, 0))


def arrays(case: Case) -> tuple[list[np.ndarray], np.ndarray, np.ndarray]:
    """Parameters [..., out] with unit gain, images [N, H, W, 3], labels [N]."""
    rng = np.random.default_rng(0)
    params = [rng.standard_normal(s, np.float32) / np.float32(np.prod(s[:-1]) ** 0.5) for s in case.shapes]
    x = rng.standard_normal((case.batch, case.size, case.size, 3), np.float32)
    return params, x, rng.integers(0, _CLASSES, case.batch)


def _loss(conv: Callable[..., Any], params: list[Any], x: Any, label: Any) -> Any:
    """The cross entropy of one image [H, W, 3]."""
    x = x[None]
    for w, stride in zip(params, _STRIDES, strict=False):
        x = jax.nn.relu(conv(x, w, (stride, stride), "SAME", dimension_numbers=_LAST))
    return -jax.nn.log_softmax(x.mean((0, 1, 2)) @ params[-1])[label]


def _looped(conv: Callable[..., Any]) -> Callable[..., Any]:
    gradient = jax.grad(partial(_loss, conv))
    return lambda params, x, labels: lax.map(lambda example: gradient(params, *example), (x, labels))
