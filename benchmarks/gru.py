"""The GRU: forward, and forward with the gradients of x, w, r, b and initial_h."""

from __future__ import annotations

import argparse
import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxgrad
from benchmarks import cudnn_worker, torch_peers
from benchmarks.compare import TOLERANCE, Work, agreeing, compare
from benchmarks.contender_names import (
    CUDNN_RNN,
    CUDNN_RNN_F16,
    OURS,
    OURS_ON_XLA,
    OURS_WITHOUT_RESETS,
    SCAN,
    TORCH_GRU,
    TORCH_GRU_GRAPH,
)
from benchmarks.measuring import measured
from benchmarks.options import Options
from benchmarks.timing import (
    Contender,
    InProgram,
    jax_in_program_contenders,
    kernel_seconds,
    torch_contender,
    torch_queued_contender,
)
from benchmarks.wording import brief
from jaxgrad._src.bench.call import value_and_gradients
from jaxgrad._src.bench.gru import GruCall, scan_gru
from jaxgrad._src.tuning.timing import random_operands

PASSES = ("forward", "forward+backward")
_OUTSIDE_JAX = (TORCH_GRU, TORCH_GRU_GRAPH, CUDNN_RNN, CUDNN_RNN_F16)
CONTENDERS = (OURS, OURS_ON_XLA, SCAN, *_OUTSIDE_JAX, OURS_WITHOUT_RESETS)
_KERNELS = {"forward": "gru_forward", "backward": "gru_backward"}  # the names in ffi/cuda/gru
NOTES = (
    "Cases are T,B,I,H; lbr is linear_before_reset.",
    "forward is a call without gradients; forward+backward is a call with the gradients of x, w, r, b and initial_h.",
    "torch.nn.GRU and cuDNN compute lbr=1 only, and take no resets. torch.nn.GRU is not measured with lengths.",
    "jaxgrad without resets is the same call without the argument reset, in cases with resets.",
    "cuDNN RNN is the fastest of cuDNN's algorithms, data layouts and math types, called without a framework, queued "
    "or in a CUDA graph. algorithms has the times of all.",
    "kernel_us_a_step is the device time of jaxgrad's CUDA kernels in a call with gradients, over the number of steps, "
    "without the products before and after them.",
    "On a GPU, a time is that of many calls in one program of JAX. f32 is float32 without TF32.",
    "floor_ms is the time of the same operations as large matrix products of the same precision.",
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
    highest: bool = False  # float32 without TF32

    @property
    def label(self) -> str:
        words = {"bf16": self.dtype == "bfloat16", "f32": self.highest}
        words |= {name: getattr(self, name) for name in ("bidirectional", "resets", "lengths")}
        return " ".join([f"{self.T},{self.B},{self.I},{self.H}", *(word for word, is_set in words.items() if is_set)])

    @property
    def precision(self) -> str:
        """Of matrix products, as `jax.default_matmul_precision` takes it."""
        return "highest" if self.highest else "default"

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
    # A run may have to end before the last case.
    "gpu": tuple(
        dataclasses.replace(case, **precision)
        for precision in ({}, {"dtype": "bfloat16"}, {"highest": True})
        for case in (
            Case(100, 32, 128, 256),
            Case(200, 64, 512, 512),
            Case(500, 16, 64, 128),
            Case(100, 128, 1024, 1024),
            Case(64, 16, 64, 64),
            Case(200, 256, 256, 256),
            Case(1000, 8, 256, 256),
            Case(128, 2048, 128, 128, resets=True),
            Case(128, 2048, 128, 128),
            Case(64, 64, 2048, 2048),
            Case(100, 32, 128, 256, bidirectional=True),
            Case(500, 16, 64, 128, lengths=True),
        )
    ),
}
# What the tables of preferences are measured with: few steps too, and no case whose call another case has. No case has
# one step: a measurement includes the gradients, which a rollout does not compute.
PREFERENCE_CASES = {
    "cpu": CASES["cpu"],
    "gpu": (
        *(case for case in CASES["gpu"] if not (case.resets or case.lengths or case.highest)),
        *(Case(T, 64, 128, 128) for T in (2, 4)),
        *(Case(2, 64, H, H, dtype="bfloat16") for H in (1024, 2048)),
        Case(32, 512, 512, 512),
        Case(32, 512, 1024, 1024),
        Case(32, 512, 1024, 1024, dtype="bfloat16"),
        Case(32, 1024, 1024, 1024, dtype="bfloat16"),
        Case(32, 512, 2048, 2048, dtype="bfloat16"),
    ),
}
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
    platform = jax.default_backend()
    left_out = torch_peers.left_out((TORCH_GRU, TORCH_GRU_GRAPH), options)
    if platform != "gpu":
        left_out[TORCH_GRU_GRAPH] = "there is no GPU"
    if (reason := cudnn_worker.why_not(platform)) is not None:
        left_out[CUDNN_RNN] = reason
    if explanation.implementation == "xla":
        left_out[OURS_ON_XLA] = "jaxgrad runs on XLA here"

    def rows_of(case: Case) -> list[dict[str, Any]]:
        start = time.perf_counter()
        rows = _rows(case, left_out, options)
        print(f"  measured in {time.perf_counter() - start:.1f} s", flush=True)
        return rows

    return measured("gru", cases, rows_of, [explanation], NOTES, left_out, layout="gru")


def _rows(case: Case, left_out: dict[str, str], options: Options) -> list[dict[str, Any]]:
    """Those of both passes, without and with linear_before_reset; contenders that fail are added to `left_out`."""
    inputs, cotangents = arrays(case)
    programs = {
        key: InProgram(name, *function_and_args, case.precision, key[1] != "forward")
        for key, function_and_args in functions(case, inputs, cotangents).items()
        if options.wants(name := key[2]) and name not in left_out
    }
    found = dict(zip(programs, jax_in_program_contenders(list(programs.values())), strict=True))
    for key, contender in found.items():
        if key[2] == OURS_WITHOUT_RESETS and isinstance(contender, Contender):
            found[key] = dataclasses.replace(contender, has_same_results=False)
    rows = []
    for linear_before_reset in (False, True):
        peers = _peers(case, inputs, cotangents, left_out, options) if linear_before_reset else {}
        for which in PASSES:
            own = {name: each for (lbr, of, name), each in found.items() if (lbr, of) == (linear_before_reset, which)}
            own |= peers.get(which, {})
            rows.append(_row(work_of(case, linear_before_reset, which), own, left_out, options))
    return rows


def _row(work: Work, found: dict[str, Contender | Exception], left_out: dict[str, str], options: Options) -> Any:
    """The row, of the contenders that work and agree with jaxgrad."""
    contenders = agreeing(work, found, f"{work.label}, {work.measure}", left_out)
    row = compare(work, contenders, options.effort)
    if times := _kernel_times(work, contenders[0]):
        row["kernel_us_a_step"] = times
    if algorithms := {each.name: each.details for each in contenders if each.details}:
        row["algorithms"] = algorithms
    return row


def _kernel_times(work: Work, ours: Contender) -> dict[str, float]:
    """Microseconds a step of jaxgrad's CUDA kernels, by pass, from the profile of one call with gradients."""
    if ours.one_call is None:
        return {}
    try:
        found = kernel_seconds(ours.one_call, list(_KERNELS.values()))
    except Exception as error:  # profiling needs permission, and one process that profiles
        print(f"  no times of kernels: {brief(error)}", flush=True)
        return {}
    if not found:
        print(f"  no kernel in the profile is named {' or '.join(_KERNELS.values())}", flush=True)
    steps = work.settings["T"]
    return {name: round(1e6 * found[kernel] / steps, 4) for name, kernel in _KERNELS.items() if kernel in found}


def functions(case: Case, inputs: Any, cotangents: Any) -> dict[tuple[bool, str, str], tuple[Any, tuple[Any, ...]]]:
    """The functions in JAX and their arguments, by linear_before_reset, pass and contender."""
    lens, reset = rows_of(case)
    found: dict[tuple[bool, str, str], tuple[Any, tuple[Any, ...]]] = {}
    for lbr in (False, True):
        ours = partial(jaxgrad.gru, direction=direction(case), linear_before_reset=lbr)
        scan = partial(scan_gru, bidirectional=case.bidirectional, linear_before_reset=lbr)

        def ours_with(ours: Callable[..., Any] = ours, **settings: Any) -> Callable[..., Any]:
            return lambda x, w, r, b, initial_h: ours(x, w, r, b, lens, initial_h, **settings)

        layers = {
            OURS: ours_with(reset=reset),
            OURS_ON_XLA: ours_with(reset=reset, implementation="xla"),
            SCAN: lambda *inputs, scan=scan: scan(*inputs, lens, reset),
        }
        if case.resets:
            layers[OURS_WITHOUT_RESETS] = ours_with()
        for name, layer in layers.items():
            found[lbr, "forward", name] = layer, inputs
            found[lbr, "forward+backward", name] = gradients(layer), (inputs, cotangents)
    return found


def _peers(
    case: Case, inputs: Any, cotangents: Any, left_out: dict[str, str], options: Options
) -> dict[str, dict[str, Contender | Exception]]:
    """PyTorch and cuDNN, by pass: they compute linear_before_reset=True only."""
    found: dict[str, dict[str, Contender | Exception]] = {which: {} for which in PASSES}
    missing = {*left_out, *([CUDNN_RNN_F16] if CUDNN_RNN in left_out else [])}
    for name in _OUTSIDE_JAX:
        if case.resets or name in missing or not options.wants(name):
            continue
        make = _cudnn_contenders if name in (CUDNN_RNN, CUDNN_RNN_F16) else _torch_contenders
        try:
            made: dict[str, Any] = make(name, case, inputs, cotangents)
        except Exception as error:  # the other contenders are still measured
            made = dict.fromkeys(PASSES, error)
        for which, contender in made.items():
            found[which][name] = contender
    return found


def _torch_contenders(name: str, case: Case, inputs: Any, cotangents: Any) -> dict[str, Contender]:
    if case.lengths:
        return {}
    contender = torch_contender if name == TORCH_GRU_GRAPH else torch_queued_contender
    passes = torch_peers.passes(call_of(case), (*inputs, *cotangents), allow_tf32=not case.highest)
    return {which: contender(name, function, outputs(function)) for which, (function, outputs) in passes.items()}


def _cudnn_contenders(name: str, case: Case, inputs: Any, cotangents: Any) -> dict[str, Contender]:
    """The fastest algorithm of each pass, with all others in the details."""
    if name == CUDNN_RNN_F16 and case.dtype != "bfloat16":
        return {}
    worker = _worker(name)
    dtype = "float16" if name == CUDNN_RNN_F16 else case.dtype
    found = worker.measure(cudnn_problem(case, inputs, cotangents, rows_of(case)[0], dtype=dtype))
    return {
        which: Contender(
            name,
            partial(worker.sample, which),
            of.outputs,
            details={"fastest": of.name, "times_ms": of.times_ms, "failed": of.failed},
        )
        for which, of in found.items()
    }


@cache
def _worker(name: str) -> cudnn_worker.Worker:
    return cudnn_worker.Worker()


def cudnn_problem(
    case: Case, inputs: Any, cotangents: Any, lens: Any, *, dtype: str | None = None, device: str = "cuda"
) -> Any:
    from benchmarks.cudnn_rnn import Problem

    return Problem(
        *(tuple(np.asarray(array, np.float32) for array in arrays) for arrays in (inputs, cotangents)),
        lengths=None if lens is None else np.asarray(lens),
        dtype=dtype or case.dtype,
        allow_tf32=not case.highest,
        tolerance=TOLERANCE[case.dtype],
        device=device,
    )


def work_of(case: Case, linear_before_reset: bool, which: str) -> Work:
    return Work(
        label=f"{case.label} lbr={int(linear_before_reset)}",
        measure=which,
        settings={**dataclasses.asdict(case), "linear_before_reset": linear_before_reset},
        dtype=case.dtype,
        flops=case.forward_flops * (1 if which == "forward" else 3),
        array_bytes={"[T, B, 3H]": math.prod((case.T, case.B, case.D, 3, case.H)) * jnp.dtype(case.dtype).itemsize},
        extra=case.extra,
        precision=case.precision,
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
    call = call_of(case)
    (drawn,) = random_operands(call.operands(), call.deviations(), one_call_a_program=True)
    return tuple(drawn[:5]), tuple(drawn[5:])


def call_of(case: Case) -> GruCall:
    """Without lengths and resets. PyTorch applies the reset gate after the recurrent product."""
    return GruCall(case.label, case.dtype, case.T, case.B, case.I, case.H, case.bidirectional, linear_before_reset=True)


def gradients(layer: Callable[..., Any]) -> Callable[..., Any]:
    """Those of sum(y dy) + sum(y_h dy_h) with respect to the inputs."""
    run = value_and_gradients(layer, inputs=5)
    return lambda inputs, cotangents: run(*inputs, *cotangents)[1]
