"""Whole training steps of convolutional networks: loss, gradients, momentum, running statistics, in one jitted call."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np

import jaxgrad
from benchmarks import case_text, lax_variants, torch_peers
from benchmarks.compare import Work, compare, precision_in_use
from benchmarks.contender_names import (
    ACCELERATED,
    BEST_FLAGS,
    LAX,
    LAX_DILATED,
    LAX_PADDED,
    LAX_SLICED,
    OURS,
    OURS_CONVOLUTIONS,
    TORCH_COMPILED,
    TORCH_EAGER,
)
from benchmarks.measuring import measured
from benchmarks.networks import NETWORKS
from benchmarks.networks.initial import describe
from benchmarks.networks.jax_ops import JaxgradConvolutionOps, JaxgradOps, LaxOps, PaddedLaxOps, SlicedLaxOps
from benchmarks.networks.ops import Norm
from benchmarks.options import Options
from benchmarks.timing import Contender, jax_loop_contenders, raised, timed, torch_queued_contender
from benchmarks.training import State, arguments, training_step

_JAX_LIBRARIES = {
    OURS: JaxgradOps,
    OURS_CONVOLUTIONS: JaxgradConvolutionOps,
    ACCELERATED: LaxOps,
    LAX: LaxOps,
    LAX_PADDED: PaddedLaxOps,
    LAX_DILATED: LaxOps,
    LAX_SLICED: SlicedLaxOps,
}
_LAX = (LAX, LAX_PADDED, LAX_DILATED, LAX_SLICED)
_FLAGGED = tuple(name + BEST_FLAGS for name in _LAX)
_TORCH = (TORCH_EAGER, TORCH_COMPILED)
OPS = (
    *(jaxgrad.conv_general_dilated, jaxgrad.conv_transpose, jaxgrad.batch_norm_training, jaxgrad.group_norm),
    *(jaxgrad.layer_norm, jaxgrad.max_pool),
)
CONTENDERS = (*_JAX_LIBRARIES, *_FLAGGED, *_TORCH)
NOTES = (
    "Cases are a network of benchmarks/networks, its batch and the sizes of its input.",
    "A step is the loss, all gradients, SGD with momentum and the running statistics of batch normalization, in place.",
    "jax.lax is the same step with the convolutions and poolings of jax.lax and the norms in jax.numpy, "
    "differentiated by jax.grad.",
    "jax.lax, accelerated is the step of jax.lax under jaxgrad.accelerate; jaxgrad convolutions is that step with the "
    "convolutions of jaxgrad in place of jax.lax.",
    "jax.lax after jnp.pad pads causal convolutions with jnp.pad first, as Flax does.",
    "jax.lax after lax.pad dilates and pads the input of transposed convolutions with lax.pad first.",
    "best flags are those of lax_variants.py, on a CPU.",
    "torch, compiled is torch.compile of the loss and its gradients in its default mode, with the eager optimizer.",
    "Max pooling in jax.lax is lax.reduce_window; jax.lax, maximum of slices has the maximum of slices in its place. "
    "So do times of jaxgrad convolutions and of jax.lax after lax.pad that are of another run.",
)
# Limits of ||a - b|| / ||b||, by precision and by quantity. An activation that rounds to the other side of zero changes
# a gradient by more than the rounding: if a share s of them does, by about sqrt(s) in each layer. The gradients of two
# correct ResNet-50s in bfloat16 are 0.3 apart, in TF32 about a third of that. A zero gradient, or another layer's, is
# off by 1 or more.
_TOLERANCES = {
    "float32": {"loss": 1e-4, "params": 1e-2, "statistics": 1e-2, "gradients": 1e-2},
    "TF32": {"loss": 3e-3, "params": 1e-2, "statistics": 1e-2, "gradients": 0.25},
    "bfloat16": {"loss": 2e-2, "params": 5e-2, "statistics": 5e-2, "gradients": 0.6},
}
# Networks whose bfloat16 gradients at the initial parameters are rounding errors: those of jax.lax differ from its
# float32 gradients by about their norm. In bfloat16 only losses and statistics are compared. TF32 rounds to 3 more bits
# of mantissa, so that errors are an eighth of that norm, and those of two contenders add up.
_ROUNDED = ("mobilenet-v2",)
_ROUNDED_GRADIENTS = {"bfloat16": math.inf, "TF32": 0.5}


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


# The networks with the slowest gradients in XLA come first: a run may have to end before the last.
_GPU_CASES = tuple(
    Case(network, batch, size, dtype)
    for network, batch, size in (
        ("unet3d", 2, 64),
        ("unet", 16, 256),
        ("wavenet", 8, 16384),
        ("wavenet-causal", 8, 16384),
        ("resnext-blocks", 64, 56),
        ("ddpm-unet", 64, 32),
        ("convnext-blocks96", 64, 56),
        ("convnext-blocks384", 64, 14),
        ("vit-stem", 64, 224),
        ("conformer", 16, 1000),
        ("resnet-blocks", 64, 56),
        ("resnet50", 64, 224),
        ("resnext50", 64, 224),
        ("convnext-t", 64, 224),
        ("mobilenet-v2", 64, 224),
        ("efficientnet-b0", 64, 224),
    )
    for dtype in ("bfloat16", "float32")
)
CASES = {
    "cpu": (
        Case("resnext", 8, 32),
        Case("mobilenet", 8, 32),
        Case("resnet18-cifar", 8, 64),
        Case("resnet18", 4, 224),
        Case("ddpm-unet-small", 4, 32),
    ),
    "gpu": _GPU_CASES,
}
QUICK_CASES = (
    Case("resnext", 2, 8),
    Case("unet3d", 1, 8),
    Case("wavenet-causal", 1, 32, "bfloat16"),
    Case("ddpm-unet-small", 2, 8),
)


def parse_case(text: str) -> Case:
    """network,batch,size or network,batch,size,bf16; networks are those in benchmarks/networks/__init__.py"""
    network, sizes, dtype = case_text.parse(text, NETWORKS, 2, parse_case.__doc__)
    return Case(network, *sizes, dtype)


def measure(cases: Sequence[Case], options: Options) -> dict[str, Any]:
    """The report (report.py)."""
    left_out = torch_peers.left_out(_TORCH, options) | lax_variants.left_out(_FLAGGED, options)
    explanations = map(jaxgrad.explain, OPS)
    return measured("steps", cases, lambda case: [_row(case, left_out, options)], explanations, NOTES, left_out)


def _row(case: Case, left_out: dict[str, str], options: Options) -> dict[str, Any]:
    network = NETWORKS[case.network]
    described = describe(network.run, case.x)
    args = arguments(network, described, case.x)
    steps: dict[str, Any] = {}
    has = {LAX_PADDED: described.asymmetric, LAX_DILATED: described.transposed, LAX_SLICED: described.pooled}
    of_lax = [name for name in _LAX if has.get(name, True)]
    for name in (OURS, OURS_CONVOLUTIONS, ACCELERATED, *lax_variants.with_flags(of_lax, left_out)):
        if options.wants(name):
            step = partial(training_step, _JAX_LIBRARIES[name.removesuffix(BEST_FLAGS)], network)
            steps[name] = jaxgrad.accelerate(step) if name == ACCELERATED else step
    in_force = {name: lax_variants.context_of(name) for name in steps}
    made = partial(jax_loop_contenders, steps, *args, in_force=in_force)
    found = raised(timed(f"{', '.join(steps)}: ready", made))
    for name in _TORCH:
        if options.wants(name) and name not in left_out:
            make = partial(timed, f"{name}: ready", partial(_torch_contender, name, case, *args))
            if name != TORCH_COMPILED:
                found.append(make())
            elif (made := torch_peers.compiled_contender(make, case.label, options, left_out)) is not None:
                found.append(made)
    return compared(case, described.flops, args[0], found, options)


def compared(case: Case, flops: int, state: State, found: Sequence[Contender], options: Options) -> dict[str, Any]:
    """The row of a case: the contenders' results are compared in pieces, then the contenders are timed."""
    work = Work(
        label=case.label,
        measure="training step",
        settings=dataclasses.asdict(case),
        dtype=case.dtype,
        flops=flops,
        array_bytes={"parameters": sum(leaf.nbytes for leaf in jax.tree.leaves(state.params))},
        extra=case.extra,
    )
    pieces = [in_pieces(contender, state) for contender in found]
    limits = tolerances(case.network, case.dtype, state)
    return timed("measured", partial(compare, work, pieces, options.effort, limits))


def tolerances(network: str, dtype: str, state: State) -> list[float]:
    """One limit for each piece of a step's results."""
    precision = precision_in_use(dtype)
    limits = _TOLERANCES[precision]
    if network in _ROUNDED and precision in _ROUNDED_GRADIENTS:
        limits = {**limits, "gradients": _ROUNDED_GRADIENTS[precision]}
    return [limits[kind] for kind, _ in _pieces(state, 0.0)]


def _torch_contender(name: str, case: Case, state: State, x: jax.Array, target: jax.Array) -> Contender:
    from benchmarks import torch_steps

    step, (state, loss), peak_bytes = torch_steps.training_step(
        NETWORKS[case.network], state, x, target, compiled=name == TORCH_COMPILED
    )
    contender = torch_queued_contender(name, step, jax.tree.leaves((state, loss)))
    return dataclasses.replace(contender, peak_bytes=peak_bytes)


def _pieces(state: State, loss: Any) -> Iterator[tuple[str, Any]]:
    """The pieces of a step's results that are compared, each with its key in `_TOLERANCES`.

    The gradients of a normalization's scale and bias are one piece, and so are its mean and variance. Alone, some are
    nothing but rounding errors: the gradient of a bias that the next normalization cancels, and the mean of values that
    were normalized before.
    """
    yield "loss", loss
    yield from (("params", layer) for layer in state.params)
    for layer in state.velocity:
        leaves = [layer] if isinstance(layer, Norm) else jax.tree.leaves(layer)
        yield from (("gradients", leaf) for leaf in leaves)
    yield from (("statistics", pair) for pair in state.statistics)


def in_pieces(contender: Contender, state: State) -> Contender:
    """The contender of a step, with the outputs in the pieces that are compared."""
    pieces = _pieces(*jax.tree.unflatten(jax.tree.structure((state, 0.0)), contender.outputs))
    outputs = [np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(piece)]) for _, piece in pieces]
    return dataclasses.replace(contender, outputs=outputs)
