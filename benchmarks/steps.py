"""Whole training steps of convolutional networks: loss, gradients, momentum, running statistics, in one jitted call."""

from __future__ import annotations

import argparse
import dataclasses
import gc
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np

import jaxgrad
from benchmarks import environment
from benchmarks.compare import Work, compare
from benchmarks.networks import NETWORKS
from benchmarks.networks.initial import describe
from benchmarks.networks.jax_ops import JaxgradOps, LaxOps
from benchmarks.networks.ops import Norm
from benchmarks.report import OURS
from benchmarks.timing import Contender, Effort, jax_loop_contender, torch_queued_contender, why_not_torch
from benchmarks.training import State, arguments, training_step

BASELINE = "jax.lax"
TORCH = "torch"
NOTES = (
    "Cases are a network, its batch and the sizes of its input; benchmarks/networks says what they are.",
    "A step is the loss, all gradients, SGD with momentum and the running statistics of batch normalisation, in the "
    "memory of the step before.",
    "jax.lax is the same step on jax.lax.conv_general_dilated, jax.lax.conv_transpose and batch normalisation in "
    "jax.numpy, by jax.grad.",
    "Both take the maximum of slices for max pooling, because XLA's gradient of lax.reduce_window is slow.",
)
# Of ||a - b|| / ||b||, by the precision and by what is compared. An activation that rounds to the other side of zero
# changes a gradient by more than the rounding: with a share s of them on the other side, by about sqrt(s) of it in each
# layer that it goes through. Two right ResNet-50s in bfloat16 have gradients 0.3 apart, in TF32 about a third of that.
# A gradient that is zero, or another layer's, is off by 1 or more.
_TOLERANCES = {
    "float32": {"loss": 1e-4, "params": 1e-2, "statistics": 1e-2, "gradients": 1e-2},
    "TF32": {"loss": 3e-3, "params": 1e-2, "statistics": 1e-2, "gradients": 0.25},
    "bfloat16": {"loss": 2e-2, "params": 5e-2, "statistics": 5e-2, "gradients": 0.6},
}


@dataclasses.dataclass(frozen=True)
class Case:
    network: str
    batch: int
    size: int  # of every spatial axis of the input
    dtype: str = "float32"
    extra: bool = False

    @property
    def label(self) -> str:
        sizes = "x".join(map(str, self.x.shape[:-1]))
        return f"{self.network} {sizes}" + (" bf16" if self.dtype == "bfloat16" else "")

    @property
    def x(self) -> jax.ShapeDtypeStruct:
        network = NETWORKS[self.network]
        return jax.ShapeDtypeStruct((self.batch, *(self.size,) * network.spatial, network.features), self.dtype)


# The first are those whose gradients XLA is slowest at: a run may have to end before the last.
_GPU_CASES = tuple(
    Case(network, batch, size, dtype)
    for network, batch, size in (
        ("unet3d", 2, 64),
        ("unet", 16, 256),
        ("wavenet", 8, 16384),
        ("wavenet-causal", 8, 16384),
        ("resnext-blocks", 64, 56),
        ("convnext-blocks96", 64, 56),
        ("convnext-blocks384", 64, 14),
        ("resnet-blocks", 64, 56),
        ("resnet50", 64, 224),
        ("resnext50", 64, 224),
        ("convnext-t", 64, 224),
    )
    for dtype in ("bfloat16", "float32")
)
CASES = {
    "cpu": (
        Case("resnext", 8, 32),
        Case("mobilenet", 8, 32),
        Case("resnet18-cifar", 8, 64),
        Case("resnet18", 4, 224),
    ),
    "gpu": _GPU_CASES,
}
QUICK_CASES = (Case("resnext", 2, 8), Case("unet3d", 1, 8), Case("wavenet-causal", 1, 32, "bfloat16"))
_DTYPES = {"f32": "float32", "bf16": "bfloat16"}


def parse_case(text: str) -> Case:
    """network,batch,size or network,batch,size,bf16; networks are those in benchmarks/networks/__init__.py"""
    network, *sizes = text.split(",")
    dtype = _DTYPES.get(sizes.pop()) if len(sizes) == 3 else "float32"
    valid = network in NETWORKS and len(sizes) == 2 and all(s.isdecimal() and int(s) > 0 for s in sizes)
    if dtype is None or not valid:
        raise argparse.ArgumentTypeError(f"must be {parse_case.__doc__}, got {text!r}; it has {', '.join(NETWORKS)}")
    return Case(network, *map(int, sizes), dtype)


def measure(cases: Sequence[Case], effort: Effort) -> dict[str, Any]:
    """The report, as report.py wants it."""
    ops = (jaxgrad.conv_general_dilated, jaxgrad.conv_transpose, jaxgrad.batch_norm_training)
    left_out = {TORCH: reason} if (reason := why_not_torch()) is not None else {}
    rows = []
    for case in cases:
        print(case.label, flush=True)
        rows.append(_row(case, left_out, effort))
        gc.collect()  # what a case had on the device, before the next one's memory is looked at
    return {
        "op": "steps",
        "environment": environment.describe(),
        "implementation": "; ".join(str(jaxgrad.explain(op)) for op in ops),
        "left_out": left_out,
        "notes": NOTES,
        "rows": rows,
    }


def _row(case: Case, left_out: dict[str, str], effort: Effort) -> dict[str, Any]:
    network = NETWORKS[case.network]
    described = describe(network.run, case.x)
    args = arguments(network, described, case.x)
    found: list[Contender] = []
    for name, library in {OURS: JaxgradOps, BASELINE: LaxOps}.items():
        step = partial(training_step, library, network)
        found.append(timed(f"{name}: ready", partial(jax_loop_contender, name, step, *args)))
    if TORCH not in left_out:
        found.append(timed(f"{TORCH}: ready", partial(_torch_contender, case, *args)))
    found = [in_pieces(contender, args[0]) for contender in found]
    work = Work(
        label=case.label,
        measure="training step",
        settings=dataclasses.asdict(case),
        dtype=case.dtype,
        flops=described.flops,
        array_bytes={"parameters": sum(leaf.nbytes for leaf in jax.tree.leaves(args[0].params))},
        extra=case.extra,
    )
    return timed("measured", partial(compare, work, found, effort, tolerances(case.dtype, args[0])))


def tolerances(dtype: str, state: State) -> list[float]:
    """Of each piece of a step's results."""
    precision = "TF32" if dtype == "float32" and jax.default_backend() == "gpu" else dtype
    return [_TOLERANCES[precision][kind] for kind, _ in _pieces(state, 0.0)]


def timed(what: str, function: Callable[[], Any]) -> Any:
    """Its result; prints how long it took."""
    start = time.perf_counter()
    found = function()
    print(f"  {what} after {time.perf_counter() - start:.1f} s", flush=True)
    return found


def _torch_contender(case: Case, state: State, x: jax.Array, target: jax.Array) -> Contender:
    from benchmarks import torch_steps

    on_gpu = jax.default_backend() == "gpu"
    step, (state, loss), peak_bytes = torch_steps.training_step(NETWORKS[case.network], state, x, target, on_gpu)
    contender = torch_queued_contender(TORCH, step, jax.tree.leaves((state, loss)), on_gpu)
    return dataclasses.replace(contender, peak_bytes=peak_bytes)


def _pieces(state: State, loss: Any) -> Iterator[tuple[str, Any]]:
    """What a step returns, in the pieces that are compared, each with its key in `_TOLERANCES`.

    The gradients of a normalisation's scale and bias are one piece, and so are its mean and variance: a bias that the
    next normalisation cancels has a gradient of nothing but rounding errors, and of such errors is the mean that
    follows a normalisation without relu.
    """
    yield "loss", loss
    yield from (("params", layer) for layer in state.params)
    for layer in state.velocity:
        leaves = [layer] if isinstance(layer, Norm) else jax.tree.leaves(layer)
        yield from (("gradients", leaf) for leaf in leaves)
    yield from (("statistics", pair) for pair in state.statistics)


def in_pieces(contender: Contender, state: State) -> Contender:
    """With the outputs of a step in the pieces that are compared."""
    pieces = _pieces(*jax.tree.unflatten(jax.tree.structure((state, 0.0)), contender.outputs))
    outputs = [np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(piece)]) for _, piece in pieces]
    return dataclasses.replace(contender, outputs=outputs)
