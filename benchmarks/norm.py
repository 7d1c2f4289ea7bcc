"""Batch, group, layer and RMS norm: forward, and forward with the gradients of all inputs."""

from __future__ import annotations

import argparse
import dataclasses
import math
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import flax_norm, torch_peers
from benchmarks.compare import Work, compare
from benchmarks.contender_names import FLAX, OURS, OURS_ON_CUDNN, OURS_ON_XLA, TORCH_COMPILED, TORCH_EAGER
from benchmarks.measuring import measured
from benchmarks.options import Options
from benchmarks.timing import Call, Contender, jax_contenders, torch_contender
from jaxgrad._src.bench import shapes
from jaxgrad._src.bench.norm import EPSILON, NormCall
from jaxgrad._src.choice.explain import Explanation, explain
from jaxgrad._src.tuning.timing import random_operands

CONTENDERS = (OURS, OURS_ON_XLA, OURS_ON_CUDNN, FLAX, TORCH_EAGER, TORCH_COMPILED)
NOTES = (
    "Cases are a norm, the shape of x, whose last axis has the features unless feature_axis names another, and what "
    "follows the norm.",
    "Scale and bias are float32; bfloat16 for PyTorch's group, layer and RMS norm of a bfloat16 x.",
    f"{FLAX} has the moments in float32 and the variance as E[x^2] - E[x]^2, differentiated by jax.grad.",
    f"{OURS_ON_XLA} is implementation='xla', {OURS_ON_CUDNN} is implementation='cudnn'.",
    "torch, compiled is torch.compile of the norm, the residual and the activation, and of their gradients.",
    "forward is y without gradients; forward+backward is y and the gradients of x, scale, bias and a residual.",
    "floor_ms is the time to read and write each array once in each pass at the rate of a large addition: forward x, "
    "a residual and y; backward x, dy, dx and the gradient of a residual, and between both the mask of a relu after a "
    "residual, of one bit for each element. Arrays in a cache are faster.",
)


@dataclasses.dataclass(frozen=True)
class Case(NormCall):
    """A call of `python -m jaxgrad bench`, and whether it adds a residual before the activation."""

    residual: bool = False

    @property
    def label(self) -> str:
        return re.sub("(activation|dtype)=", "", self.text.replace(",", " "))

    def operands(self) -> list[jax.ShapeDtypeStruct]:
        *inputs, dy = super().operands()
        return [*inputs, *[dy] * self.residual, dy]

    def explanation(self) -> Explanation:
        return explain(self._call(), *super().operands()[:-1])

    def layer(self, implementation: str | None = None) -> Callable[..., jax.Array]:
        """y of jaxgrad, as a function of x, scale, the bias if the norm has one, and the residual if the case does."""

        def run(x: jax.Array, *others: jax.Array) -> jax.Array:
            parameters, residual = self._split(others)
            y = self._call()(x, *parameters, residual=residual, implementation=implementation)
            return y[0] if self.kind == "batch-norm" else y

        return run

    def as_in_flax(self, x: jax.Array, *others: jax.Array) -> jax.Array:
        """The same function as in flax."""
        parameters, residual = self._split(others)
        settings = {"epsilon": EPSILON, "groups": self.groups, "feature_axis": self.feature_axis}
        y = flax_norm.normalized(self.kind, x, *parameters, residual=residual, **settings)
        return getattr(jax.nn, self.activation)(y) if self.activation else y

    def _split(self, others: tuple[jax.Array, ...]) -> tuple[tuple[jax.Array, ...], jax.Array | None]:
        """Scale and bias, and the residual."""
        return (others[:-1], others[-1]) if self.residual else (others, None)

    def work(self, which: str) -> Work:
        size, gradients = math.prod(self.shape), which != "forward"
        bytes_of_x = size * jnp.dtype(self.dtype).itemsize
        passes = (5 if gradients else 2) + self.residual * (1 + gradients)
        mask_bytes = 2 * size // 8 if gradients and self.residual and self.activation == "relu" else 0
        return Work(
            label=self.label,
            measure=which,
            settings=dataclasses.asdict(self),
            dtype=self.dtype,
            flops=0,
            array_bytes={"x": bytes_of_x},
            bytes_moved=passes * bytes_of_x + mask_bytes,
        )


def parse_case(text: str) -> Case:
    """batch-norm, group-norm, layer-norm or rms-norm, a colon and a call as in python -m jaxgrad bench, which may have
    a residual: batch-norm:8x28x28x128,activation=relu,residual,dtype=bf16"""
    kind, _, call = text.partition(":")
    if kind not in _PARSERS:
        raise argparse.ArgumentTypeError(f"must be {parse_case.__doc__}, got {text!r}")
    parts = call.split(",")
    parsed = _PARSERS[kind](",".join(part for part in parts if part != "residual"))
    settings = {**vars(parsed), "text": f"{kind} {call}", "dtype": parsed.dtype or "float32"}
    return Case(**settings, residual="residual" in parts)


_PARSERS = {
    "batch-norm": shapes.batch_norm,
    "group-norm": shapes.group_norm,
    "layer-norm": shapes.layer_norm,
    "rms-norm": shapes.rms_norm,
}


def _cases(kind: str, sizes: str, *options: str) -> tuple[Case, ...]:
    """A case for each of the sizes and each of the options."""
    return tuple(parse_case(f"{kind}:{each},{of}".rstrip(",")) for of in options for each in sizes.split())


def _gpu_cases(dtype: str) -> tuple[Case, ...]:
    batch = "64x112x112x64 64x56x56x256 64x28x28x512 64x14x14x1024 64x7x7x2048 64x28x28x128"
    group = "16x64x64x256 4x128x128x128 8x64x64x320 8x32x32x640 8x16x16x1280"
    layer = "64x56x56x96 64x28x28x192 64x14x14x384 64x7x7x768 8192x1024 4096x4096 131072x32"
    return (
        *_cases("batch-norm", batch, f"activation=relu,{dtype}", f"activation=relu,residual,{dtype}"),
        *_cases("group-norm", group, f"groups=32,activation=silu,{dtype}"),
        *_cases("group-norm", "2x64x64x64x64", f"groups=8,activation=silu,{dtype}"),
        *_cases("layer-norm", layer, dtype),
        *_cases("rms-norm", "8192x1024 4096x4096", dtype),
    )


CASES = {
    "cpu": (
        *_cases("batch-norm", "8x112x112x64 8x56x56x64 8x28x28x128 8x14x14x256 8x7x7x512 32x8x8x16 256x512", ""),
        *_cases("batch-norm", "8x64x112x112 8x256x14x14", "feature_axis=1"),
        *_cases("batch-norm", "8x112x112x64", "dtype=bf16", "activation=relu", "activation=relu,residual"),
        *_cases("group-norm", "2x64x64x128 2x16x16x640", "groups=32,activation=silu"),
        *_cases("group-norm", "1x16x32x32x64", "groups=8,activation=silu"),
        *_cases("layer-norm", "8x28x28x192 512x1024 16384x32", ""),
        *_cases("rms-norm", "512x1024", "", "dtype=bf16"),
    ),
    "gpu": (*_gpu_cases("dtype=bf16"), *_gpu_cases("dtype=f32")),
}
QUICK_CASES = (
    *_cases("batch-norm", "2x8x8x16", "", "activation=relu,residual,dtype=bf16"),
    *_cases("batch-norm", "2x16x8x8", "feature_axis=1"),
    *_cases("group-norm", "2x8x8x16", "groups=4,activation=silu"),
    *_cases("layer-norm", "8x16", "dtype=bf16"),
    *_cases("rms-norm", "8x16", ""),
)


def measure(cases: Sequence[Case], options: Options) -> dict[str, Any]:
    """The report (report.py)."""
    left_out = torch_peers.left_out((TORCH_EAGER, TORCH_COMPILED), options)
    explanations = sorted({f"{case.kind}: {case.explanation()}" for case in cases})
    return measured("norm", cases, partial(_rows, left_out=left_out, options=options), explanations, NOTES, left_out)


def _rows(case: Case, left_out: dict[str, str], options: Options) -> list[dict[str, Any]]:
    operands = make_arrays(case)
    layers = {OURS: case.layer(), OURS_ON_XLA: case.layer("xla"), FLAX: case.as_in_flax}
    if case.explanation().implementation == "xla":
        del layers[OURS_ON_XLA]  # the same program as jaxgrad's
    if jax.default_backend() == "gpu" and case.kind == "batch-norm":
        layers[OURS_ON_CUDNN] = case.layer("cudnn")
    layers = {name: layer for name, layer in layers.items() if options.wants(name)}
    rows = []
    of_torch = _torch_contenders(case, operands, left_out, options)
    for each in case.passes:
        which = torch_peers.MEASURES.get(each.name, each.name)
        contenders = jax_contenders([Call(name, each.of(layer), tuple(operands)) for name, layer in layers.items()])
        rows.append(compare(case.work(which), [*contenders, *of_torch.get(which, [])], options.effort))
    return rows


def make_arrays(case: Case) -> list[jax.Array]:
    """The inputs and dy."""
    (operands,) = random_operands(case.operands(), one_call_a_program=True)
    return operands


def _torch_contenders(
    case: Case, operands: Sequence[jax.Array], left_out: dict[str, str], options: Options
) -> dict[str, list[Contender]]:
    """Those of each pass."""
    names = [name for name in (TORCH_EAGER, TORCH_COMPILED) if options.wants(name) and name not in left_out]
    found: dict[str, list[Contender]] = {}
    if case.kind != "batch-norm":  # on a GPU, the other norms of PyTorch require scale and bias of the dtype of x
        operands = [operand.astype(case.dtype) for operand in operands]
    if TORCH_COMPILED in names:
        torch_peers.forget()
    for which, (function, outputs) in torch_peers.passes(case, operands).items() if names else ():
        found[which] = [torch_contender(TORCH_EAGER, function, outputs(function))] if TORCH_EAGER in names else []
        if TORCH_COMPILED in names:
            # torch.autograd.grad is not in the graph: PyTorch compiles the backward pass along with the forward pass.
            compiled = torch_peers.compiled(function, fullgraph=which == "forward")
            make = partial(_torch_compiled, compiled, outputs)
            contender = torch_peers.compiled_contender(make, f"{case.label}, {which}", options, left_out)
            found[which] += [] if contender is None else [contender]
    return found


def _torch_compiled(function: Callable[[], Any], outputs: Callable[[Callable[[], Any]], Any]) -> Contender:
    return torch_contender(TORCH_COMPILED, function, outputs(function))
