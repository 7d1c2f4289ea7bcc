"""The GRU: forward, and forward with the gradients of x, w, r, b and initial_h."""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

import jaxgrad
from benchmarks import environment, torch_peers
from benchmarks.compare import Work, compare
from benchmarks.contender_names import OURS, OURS_ON_XLA, SCAN, TORCH_GRU, TORCH_GRU_GRAPH
from benchmarks.options import Options
from benchmarks.scan_gru import scan_gru
from benchmarks.timing import Contender, jax_in_program_contender, torch_contender, torch_queued_contender

CONTENDERS = (OURS, OURS_ON_XLA, SCAN, TORCH_GRU, TORCH_GRU_GRAPH)
NOTES = (
    "Cases are T,B,I,H; lbr is linear_before_reset.",
    "forward is a call without gradients; forward+backward is a call with the gradients of x, w, r, b and initial_h.",
    "torch.nn.GRU computes lbr=1 only, and takes no resets. It is not measured with lengths.",
    "On a GPU, a time is that of many calls in one program of JAX. f32 is float32 without TF32.",
    "floor_ms is the time of the same operations as large matrix products.",
)


@dataclasses.dataclass(frozen=True)
class Case:
    """T steps of B rows, I inputs, H hidden units."""

    T: int
    B: int
    I: int  # noqa: E741
    H: int
    dtype: str = "float32"
    bidirectional: bool = False
    extra: bool = False
    resets: bool = False
    lengths: bool = False
    highest: bool = False  # precision: float32 without TF32

    @property
    def label(self) -> str:
        words = {"bf16": self.dtype == "bfloat16", "f32": self.highest}
        words |= {name: getattr(self, name) for name in ("bidirectional", "resets", "lengths")}
        return " ".join([f"{self.T},{self.B},{self.I},{self.H}", *(word for word, is_set in words.items() if is_set)])

    @property
    def D(self) -> int:  # noqa: N802
        return 1 + self.bidirectional

    @property
    def forward_flops(self) -> int:
        """Of the matrix products of the forward pass; the backward pass has twice as many."""
        return 2 * self.T * self.B * self.D * 3 * self.H * (self.I + self.H)


CASES = {
    "cpu": (
        Case(100, 32, 64, 128),
        Case(200, 1, 64, 64),
        Case(50, 64, 256, 512),
        Case(500, 16, 32, 64),
        Case(100, 32, 64, 128, bidirectional=True, extra=True),
        Case(100, 32, 64, 128, dtype="bfloat16", extra=True),
    ),
    "gpu": tuple(
        dataclasses.replace(case, **precision)
        for case in (
            Case(100, 32, 128, 256),
            Case(200, 64, 512, 512),
            Case(500, 16, 64, 128),
            Case(100, 128, 1024, 1024),
            Case(64, 16, 64, 64),
            Case(200, 256, 256, 256),
            Case(1000, 8, 256, 256),
            Case(128, 2048, 128, 128, resets=True),
            Case(64, 64, 2048, 2048),
            Case(100, 32, 128, 256, bidirectional=True),
            Case(500, 16, 64, 128, lengths=True),
        )
        for precision in ({}, {"highest": True}, {"dtype": "bfloat16"})
    ),
}
# What the tables of preferences are measured with: few steps too, and no case whose call another case has.
PREFERENCE_CASES = (
    *(case for case in CASES["gpu"] if not (case.resets or case.lengths or case.highest)),
    *(Case(T, 64, 128, 128) for T in (1, 2, 4)),
    Case(128, 2048, 128, 128),
    Case(32, 512, 512, 512),
    Case(32, 512, 1024, 1024),
    Case(32, 512, 1024, 1024, dtype="bfloat16"),
    Case(32, 512, 2048, 2048, dtype="bfloat16"),
)
QUICK_CASES = (Case(20, 8, 16, 32), Case(20, 1, 16, 32, bidirectional=True))


def parse_case(text: str) -> Case:
    """T,B,I,H or T,B,I,H,dtype, of float32 or bfloat16"""
    sizes, dtype = text.split(",")[:4], text.split(",")[4:] or ["float32"]
    valid = len(sizes) == 4 and all(size.isdecimal() and int(size) > 0 for size in sizes)
    if not valid or dtype not in (["float32"], ["bfloat16"]):
        raise argparse.ArgumentTypeError(f"must be {parse_case.__doc__}, got {text!r}")
    return Case(*map(int, sizes), dtype=dtype[0])


def measure(cases: Sequence[Case], options: Options) -> dict[str, Any]:
    """The report (report.py)."""
    explanation = jaxgrad.explain(jaxgrad.gru)
    left_out = torch_peers.left_out((TORCH_GRU, TORCH_GRU_GRAPH), options)
    if jax.default_backend() != "gpu":
        left_out[TORCH_GRU_GRAPH] = "there is no GPU"
    if explanation.implementation == "xla":
        left_out[OURS_ON_XLA] = "jaxgrad runs on XLA here"
    rows = []
    for case in cases:
        for linear_before_reset in (False, True):
            print(f"{case.label} linear_before_reset={linear_before_reset}", flush=True)
            rows += _rows(case, linear_before_reset, set(left_out), options)
    return {
        "op": "gru",
        "environment": environment.describe(),
        "implementation": str(explanation),
        "left_out": left_out,
        "notes": NOTES,
        "rows": rows,
    }


def _rows(case: Case, linear_before_reset: bool, left_out: set[str], options: Options) -> list[dict[str, Any]]:
    inputs, cotangents = arrays(case)
    lens, reset = rows_of(case)
    ours = partial(jaxgrad.gru, direction=direction(case), linear_before_reset=linear_before_reset, reset=reset)
    scan = partial(scan_gru, bidirectional=case.bidirectional, linear_before_reset=linear_before_reset)

    def ours_on(implementation: str | None) -> Callable[..., Any]:
        return lambda x, w, r, b, initial_h: ours(x, w, r, b, lens, initial_h, implementation=implementation)

    layers: dict[str, Callable[..., Any]] = {
        OURS: ours_on(None),
        OURS_ON_XLA: ours_on("xla"),
        SCAN: lambda *inputs: scan(*inputs, lens, reset),
    }
    contenders: dict[str, list[Contender]] = {"forward": [], "forward+backward": []}
    with jax.default_matmul_precision("highest" if case.highest else "default"):
        for name, layer in layers.items():
            if options.wants(name) and name not in left_out:
                contenders["forward"].append(jax_in_program_contender(name, layer, *inputs))
                both = jax_in_program_contender(name, _gradients(layer), inputs, cotangents)
                contenders["forward+backward"].append(both)
    torch_names = [name for name in (TORCH_GRU, TORCH_GRU_GRAPH) if options.wants(name) and name not in left_out]
    if linear_before_reset and torch_names and not (case.resets or case.lengths):
        from benchmarks import torch_gru

        on_gpu = jax.default_backend() == "gpu"
        settings = {"bidirectional": case.bidirectional, "on_gpu": on_gpu, "allow_tf32": not case.highest}
        for which, (function, outputs) in torch_gru.passes(inputs, cotangents, **settings).items():
            for name in torch_names:
                contender = torch_contender if name == TORCH_GRU_GRAPH else torch_queued_contender
                contenders[which].append(contender(name, function, outputs, on_gpu))
    return [
        compare(_work(case, linear_before_reset, which), those, options.effort) for which, those in contenders.items()
    ]


def _work(case: Case, linear_before_reset: bool, which: str) -> Work:
    return Work(
        label=f"{case.label} lbr={int(linear_before_reset)}",
        measure=which,
        settings={**dataclasses.asdict(case), "linear_before_reset": linear_before_reset},
        dtype=case.dtype,
        flops=case.forward_flops * (1 if which == "forward" else 3),
        array_bytes={"[T, B, 3H]": math.prod((case.T, case.B, case.D, 3, case.H)) * jnp.dtype(case.dtype).itemsize},
        extra=case.extra,
    )


def rows_of(case: Case) -> tuple[jax.Array | None, jax.Array | None]:
    """The lengths, from T / 2 to T, and the resets, one in a hundred steps; None where the case has none."""
    keys = jax.random.split(jax.random.key(1))
    lens = jax.random.randint(keys[0], (case.B,), case.T // 2, case.T + 1) if case.lengths else None
    return lens, jax.random.bernoulli(keys[1], 0.01, (case.T, case.B)) if case.resets else None


def direction(case: Case) -> str:
    return "bidirectional" if case.bidirectional else "forward"


def arrays(case: Case) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]:
    """Inputs (x, w, r, b, initial_h) whose gates do not saturate, and cotangents (dy, dy_h)."""
    T, B, I, H, D = case.T, case.B, case.I, case.H, case.D  # noqa: E741
    shapes = ((T, B, I), (D, 3 * H, I), (D, 3 * H, H), (D, 6 * H), (D, B, H), (T, D, B, H), (D, B, H))
    scales = (1, I**-0.5, H**-0.5, 0.1, 0.5, 1, 1)
    keys = jax.random.split(jax.random.key(0), len(shapes))
    x, w, r, b, initial_h, dy, dy_h = (
        (scale * jax.random.normal(key, shape)).astype(case.dtype)
        for key, shape, scale in zip(keys, shapes, scales, strict=True)
    )
    return (x, w, r, b, initial_h), (dy, dy_h)


def _gradients(layer: Callable[..., Any]) -> Callable[..., Any]:
    """Those of sum(y dy) + sum(y_h dy_h) with respect to the inputs."""

    def run(inputs: tuple[jax.Array, ...], cotangents: tuple[jax.Array, ...]) -> Any:
        _, pullback = jax.vjp(layer, *inputs)
        return pullback(cotangents)

    return run
