"""Whole training steps of convolutional networks: loss, gradients, momentum, running statistics, in one jitted call."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from functools import partial, reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import jaxgrad
from benchmarks import environment, models
from benchmarks.compare import Work, compare
from benchmarks.report import OURS
from benchmarks.timing import Contender, Effort, jax_loop_contender, torch_contender, why_not_torch

BASELINE = "jax.lax"
TORCH = "torch"
LEARNING_RATE, MOMENTUM, STATISTICS_MOMENTUM = 0.01, 0.9, 0.9
NOTES = (
    "Cases are a network, its batch and the height and width of its images; benchmarks/models.py says what they are.",
    "A step is the loss, all gradients, SGD with momentum and the running statistics of batch normalisation, in the "
    "memory of the step before.",
    "jax.lax is the same step on jax.lax.conv_general_dilated and batch normalisation in jax.numpy, by jax.grad.",
    "Both take the maximum of slices for max pooling, because XLA's gradient of lax.reduce_window is slow here.",
)


@dataclasses.dataclass(frozen=True)
class Case:
    network: str
    batch: int
    size: int  # of the images, in pixels
    extra: bool = False

    @property
    def label(self) -> str:
        return f"{self.network} {self.batch}x{self.size}x{self.size}"

    @property
    def dtype(self) -> str:
        return "float32"


CASES = {
    "cpu": (
        Case("resnext", 8, 32),
        Case("mobilenet", 8, 32),
        Case("resnet18-cifar", 8, 64),
        Case("resnet18", 4, 224),
    )
}
QUICK_CASES = (Case("resnext", 2, 8),)


class State(NamedTuple):
    """What a training step takes and returns."""

    params: models.Params
    velocity: models.Params
    statistics: list[tuple[Any, Any]]  # the running (mean, var) [C] of each batch normalisation


def parse_case(text: str) -> Case:
    """network,batch,size of resnext, mobilenet, resnet18 or resnet18-cifar"""
    network, *sizes = text.split(",")
    if network not in models.NETWORKS or len(sizes) != 2 or not all(s.isdecimal() and int(s) > 0 for s in sizes):
        raise argparse.ArgumentTypeError(f"must be {parse_case.__doc__}, got {text!r}")
    return Case(network, *map(int, sizes))


def measure(cases: Sequence[Case], effort: Effort) -> dict[str, Any]:
    """The report, as report.py wants it."""
    choices = [jaxgrad.explain(op) for op in (jaxgrad.conv_general_dilated, jaxgrad.batch_norm_training)]
    left_out = {TORCH: reason} if (reason := why_not_torch()) is not None else {}
    rows = []
    for case in cases:
        print(case.label, flush=True)
        rows.append(compare(_work(case), _contenders(case, left_out), effort))
    return {
        "op": "steps",
        "environment": environment.describe(),
        "implementation": "; ".join(map(str, choices)),
        "left_out": left_out,
        "notes": NOTES,
        "rows": rows,
    }


def _contenders(case: Case, left_out: dict[str, str]) -> list[Contender]:
    network, (state, images, labels) = models.NETWORKS[case.network], _arguments(case)
    found = [
        jax_loop_contender(name, partial(training_step, library, network), state, images, labels)
        for name, library in {OURS: _JAXGRAD, BASELINE: _LAX}.items()
    ]
    if TORCH not in left_out:
        from benchmarks import torch_steps

        function, outputs = torch_steps.training_step(network, state, images, labels)
        found.append(torch_contender(TORCH, function, outputs, on_gpu=False))
    return [_by_layer(contender, state) for contender in found]


def _by_layer(contender: Contender, state: State) -> Contender:
    """The contender with the numbers that belong to one layer compared as one vector.

    A bias that the next layer's normalisation cancels has a gradient of nothing but rounding errors.
    """
    structure = jax.tree.structure((state, 0.0))
    (params, velocity, statistics), loss = jax.tree.unflatten(structure, contender.outputs)
    heads = [p._replace(layers=[]) for p in (params, velocity)]
    groups = (*params.layers, *velocity.layers, *heads, *statistics, loss)
    outputs = [np.concatenate([leaf.ravel() for leaf in jax.tree.leaves(group)]) for group in groups]
    return dataclasses.replace(contender, outputs=outputs)


def _arguments(case: Case) -> tuple[State, jax.Array, jax.Array]:
    """The first state, whose velocity is zero, so that the next state holds the gradients as they are; one batch."""
    keys = jax.random.split(jax.random.key(0), 3)
    params = models.initial_params(models.NETWORKS[case.network], keys[0])
    velocity = jax.tree.map(jnp.zeros_like, params)
    statistics = [(jnp.zeros_like(layer.scale), jnp.ones_like(layer.scale)) for layer in params.layers]
    images = jax.random.normal(keys[1], (case.batch, case.size, case.size, 3))
    return State(params, velocity, statistics), images, jax.random.randint(keys[2], (case.batch,), 0, models.CLASSES)


def training_step(
    library: models.Library, network: models.Network, state: State, images: jax.Array, labels: jax.Array
) -> tuple[State, jax.Array]:
    """The next state and the loss, the mean cross entropy."""

    def loss_of(params: models.Params) -> tuple[jax.Array, Any]:
        scores, batch = models.scores(library, network, params, images)
        picked = jnp.take_along_axis(jax.nn.log_softmax(scores), labels[:, None], 1)
        return -picked.mean(), batch

    (loss, batch), gradients = jax.value_and_grad(loss_of, has_aux=True)(state.params)
    velocity = jax.tree.map(lambda v, g: MOMENTUM * v + g, state.velocity, gradients)
    params = jax.tree.map(lambda p, v: p - LEARNING_RATE * v, state.params, velocity)
    kept = STATISTICS_MOMENTUM
    statistics = jax.tree.map(lambda old, new: kept * old + (1 - kept) * new, state.statistics, batch)
    return State(params, velocity, statistics), loss


# --- the libraries ------------------------------------------------------------------------------------------------


def _conv(op: Callable[..., jax.Array], x: jax.Array, w: jax.Array, conv: models.Conv) -> jax.Array:
    pad = (conv.window // 2, conv.window // 2)
    layout = ("NHWC", "HWIO", "NHWC")
    settings = {"dimension_numbers": layout, "feature_group_count": conv.groups}
    return op(x, w, (conv.stride, conv.stride), (pad, pad), **settings)


def _batch_norm(
    x: jax.Array, scale: jax.Array, bias: jax.Array, residual: jax.Array | None, relu: bool
) -> tuple[jax.Array, jax.Array, jax.Array]:
    return jaxgrad.batch_norm_training(x, scale, bias, residual=residual, activation="relu" if relu else None)


def _plain_batch_norm(
    x: jax.Array, scale: jax.Array, bias: jax.Array, residual: jax.Array | None, relu: bool
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """As one writes it in JAX, with XLA's fusions and `jax.grad` to make it fast."""
    mean, var = x.mean((0, 1, 2)), x.var((0, 1, 2))
    y = (x - mean) * (scale * lax.rsqrt(var + 1e-5)) + bias
    y = y if residual is None else y + residual
    return jax.nn.relu(y) if relu else y, mean, var


def _max_pool(x: jax.Array) -> jax.Array:
    """Of slices: the gradient of lax.reduce_window, no op of jaxgrad's, takes six times as long on the CPU."""
    _, height, width, _ = x.shape
    padded = jnp.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)), constant_values=-jnp.inf)
    windows = itertools.product(range(3), repeat=2)
    return reduce(jnp.maximum, (padded[:, i : i + height : 2, j : j + width : 2] for i, j in windows))


def _mean(x: jax.Array) -> jax.Array:
    return x.mean((1, 2))


_JAXGRAD = models.Library(partial(_conv, jaxgrad.conv_general_dilated), _batch_norm, _max_pool, _mean)
_LAX = models.Library(partial(_conv, lax.conv_general_dilated), _plain_batch_norm, _max_pool, _mean)


# --- the floor ----------------------------------------------------------------------------------------------------


def _work(case: Case) -> Work:
    state, images, _ = jax.eval_shape(partial(_arguments, case))
    return Work(
        label=case.label,
        measure="training step",
        settings=dataclasses.asdict(case),
        dtype=case.dtype,
        flops=_flops(case, state.params, images),
        array_bytes={"parameters": sum(4 * leaf.size for leaf in jax.tree.leaves(state.params))},
        extra=case.extra,
    )


def _flops(case: Case, params: Any, images: Any) -> int:
    """Of the convolutions alone: forward and two gradients for each, but no input gradient for the first."""
    forward: list[int] = []

    def counted(x: jax.Array, w: jax.Array, conv: models.Conv) -> jax.Array:
        y = _LAX.conv(x, w, conv)
        forward.append(2 * y.size * math.prod(w.shape[:3]))
        return y

    jax.eval_shape(partial(models.scores, _LAX._replace(conv=counted), models.NETWORKS[case.network]), params, images)
    return 3 * sum(forward) - forward[0]
