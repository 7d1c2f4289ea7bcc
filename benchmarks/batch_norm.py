"""Batch normalisation with batch statistics: forward, and the gradients of x, scale and bias."""

from __future__ import annotations

import argparse
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
from benchmarks.report import OURS
from benchmarks.timing import Contender, Effort, jax_contender, torch_contender, why_not_torch

BASELINE = "jax.grad of jax.numpy"
WITH_VAR = "jax.grad of x.var"
OURS_ON_XLA = "jaxgrad on XLA"
TORCH = "torch batch_norm"
NOTES = (
    "Cases are the shape of x, with C before its channels.",
    "jax.grad of jax.numpy is a formula in two passes over x, written so that XLA fuses it well; jax.grad of x.var is "
    "the formula with x.mean and x.var, as one writes it first.",
    "forward is y without gradients; forward+backward is a call with the gradients of x, scale and bias.",
    "The floor is the time to read and write the arrays, at the rate of a large addition: x twice and y once forward, "
    "x three times, dy twice and dx once for the gradients. What a cache holds goes faster.",
)


@dataclasses.dataclass(frozen=True)
class Case:
    """The shape of x; the axis of its channels is the last, or the second."""

    shape: tuple[int, ...]
    dtype: str = "float32"
    channels_last: bool = True
    extra: bool = False

    @property
    def feature_axis(self) -> int:
        return len(self.shape) - 1 if self.channels_last else 1

    @property
    def label(self) -> str:
        sizes = [f"C{n}" if axis == self.feature_axis else str(n) for axis, n in enumerate(self.shape)]
        return "x".join(sizes) + {"float32": "", "bfloat16": " bf16"}[self.dtype]

    @property
    def array_bytes(self) -> int:
        return math.prod(self.shape) * jnp.dtype(self.dtype).itemsize


_CPU_CASES = (
    Case((8, 112, 112, 64)),
    Case((8, 56, 56, 64)),
    Case((8, 28, 28, 128)),
    Case((8, 14, 14, 256)),
    Case((8, 7, 7, 512)),
    Case((32, 8, 8, 16)),
    Case((1, 8, 8, 16)),
    Case((256, 512)),
    Case((8, 64, 112, 112), channels_last=False),
    Case((8, 256, 14, 14), channels_last=False),
    Case((8, 112, 112, 64), dtype="bfloat16"),
    Case((8, 14, 14, 256), dtype="bfloat16", extra=True),
)
CASES = {"cpu": _CPU_CASES, "gpu": (Case((128, 112, 112, 64)), Case((128, 14, 14, 256)))}
QUICK_CASES = (Case((2, 8, 8, 16)), Case((2, 16, 8, 8), channels_last=False))


def parse_case(text: str) -> Case:
    """sizes joined by x, with C before the channels, which are last or second: 8x28x28xC128 or 8x28x28xC128,bfloat16"""
    sizes, _, dtype = text.partition(",")
    parts = sizes.split("x")
    at = [i for i, part in enumerate(parts) if part.startswith("C")]
    valid = len(parts) > 1 and len(at) == 1 and at[0] in (1, len(parts) - 1)
    numbers = [part.removeprefix("C") for part in parts]
    valid = valid and all(n.isdecimal() and int(n) > 0 for n in numbers) and dtype in ("", "float32", "bfloat16")
    if not valid:
        raise argparse.ArgumentTypeError(f"must be {parse_case.__doc__}, got {text!r}")
    return Case(tuple(map(int, numbers)), dtype or "float32", at[0] == len(parts) - 1)


def plain(x: jax.Array, scale: jax.Array, bias: jax.Array, *, feature_axis: int) -> jax.Array:
    """Batch normalisation as XLA is quick at it, the variance in two passes, for `jax.grad` to differentiate."""
    axes = tuple(axis for axis in range(x.ndim) if axis != feature_axis)
    wide = x.astype(jnp.float32)
    mean = wide.mean(axes, keepdims=True)
    var = jnp.square(wide - mean).mean(axes, keepdims=True)
    scale, bias = (lax.expand_dims(a, axes) for a in (scale, bias))
    return ((wide - mean) * (scale * lax.rsqrt(var + 1e-5)) + bias).astype(x.dtype)


def with_var(x: jax.Array, scale: jax.Array, bias: jax.Array, *, feature_axis: int) -> jax.Array:
    """Batch normalisation as one writes it first."""
    axes = tuple(axis for axis in range(x.ndim) if axis != feature_axis)
    wide = x.astype(jnp.float32)
    mean, var = wide.mean(axes, keepdims=True), wide.var(axes, keepdims=True)
    scale, bias = (lax.expand_dims(a, axes) for a in (scale, bias))
    return ((wide - mean) / jnp.sqrt(var + 1e-5) * scale + bias).astype(x.dtype)


def measure(cases: Sequence[Case], effort: Effort) -> dict[str, Any]:
    """The report, as report.py wants it."""
    choice = jaxgrad.explain(jaxgrad.batch_norm_training)
    left_out = {}
    if choice.implementation == "xla":
        left_out[OURS_ON_XLA] = "jaxgrad has no kernel here and takes XLA itself"
    if (reason := why_not_torch()) is not None:
        left_out[TORCH] = reason
    for contender, reason in left_out.items():
        print(f"left out: {contender} ({reason})")
    rows = []
    for case in cases:
        print(case.label, flush=True)
        rows += _rows(case, set(left_out), effort)
    return {
        "op": "batch_norm",
        "environment": environment.describe(),
        "implementation": str(choice),
        "left_out": left_out,
        "notes": NOTES,
        "one_line_a_case": True,
        "rows": rows,
    }


def _rows(case: Case, left_out: set[str], effort: Effort) -> list[dict[str, Any]]:
    inputs, dy = _arrays(case)

    def ours_on(implementation: str | None) -> Callable[..., jax.Array]:
        settings = {"feature_axis": case.feature_axis, "implementation": implementation}
        return lambda x, scale, bias: jaxgrad.batch_norm_training(x, scale, bias, **settings)[0]

    layers = {
        OURS: ours_on(None),
        OURS_ON_XLA: ours_on("xla"),
        BASELINE: partial(plain, feature_axis=case.feature_axis),
        WITH_VAR: partial(with_var, feature_axis=case.feature_axis),
    }
    contenders: dict[str, list[Contender]] = {"forward": [], "forward+backward": []}
    for name, layer in layers.items():
        if name not in left_out:
            contenders["forward"].append(jax_contender(name, layer, *inputs))
            contenders["forward+backward"].append(jax_contender(name, _gradients(layer), inputs, dy))
    if TORCH not in left_out:
        from benchmarks import torch_batch_norm

        on_gpu = jax.default_backend() == "gpu"
        peers = torch_batch_norm.passes(inputs, dy, feature_axis=case.feature_axis, on_gpu=on_gpu)
        for which, (function, outputs) in peers.items():
            contenders[which].append(torch_contender(TORCH, function, outputs, on_gpu))
    return [compare(_work(case, which), those, effort) for which, those in contenders.items()]


def _work(case: Case, which: str) -> Work:
    return Work(
        label=case.label,
        measure=which,
        settings=dataclasses.asdict(case),
        dtype=case.dtype,
        flops=0,
        array_bytes={"x": case.array_bytes},
        extra=case.extra,
        bytes_moved=case.array_bytes * (3 if which == "forward" else 6),
    )


def _arrays(case: Case) -> tuple[tuple[jax.Array, ...], jax.Array]:
    keys = jax.random.split(jax.random.key(0), 4)
    channels = (case.shape[case.feature_axis],)
    x, dy = (jax.random.normal(key, case.shape).astype(case.dtype) for key in keys[:2])
    scale, bias = (jax.random.normal(key, channels) for key in keys[2:])
    return (x, 1 + scale / 2, bias), dy


def _gradients(layer: Callable[..., jax.Array]) -> Callable[..., Any]:
    """Those of sum(y dy) with respect to the inputs."""

    def run(inputs: tuple[jax.Array, ...], dy: jax.Array) -> tuple[jax.Array, ...]:
        _, pullback = jax.vjp(layer, *inputs)
        return pullback(dy)

    return run
