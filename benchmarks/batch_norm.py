"""Batch normalization with batch statistics: forward, and forward with the gradients of all inputs."""

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
from benchmarks import torch_peers
from benchmarks.compare import Work, compare
from benchmarks.contender_names import NUMPY_FUSED, NUMPY_VAR, OURS, OURS_ON_XLA, TORCH_EAGER
from benchmarks.measuring import measured
from benchmarks.options import Options
from benchmarks.timing import Call, jax_contenders, torch_contender
from jaxgrad._src.bench.norm import NormCall

CONTENDERS = (OURS, OURS_ON_XLA, NUMPY_FUSED, NUMPY_VAR, TORCH_EAGER)
NOTES = (
    "Cases are the shape of x, with C before its channels.",
    "jax.grad of jax.numpy computes the variance in a second pass over x, which XLA fuses well; jax.grad of x.var is "
    "the formula with x.mean and x.var.",
    "forward is y without gradients; forward+backward is y and the gradients of x, scale, bias and a residual.",
    "floor_ms is the time to read and write the arrays at the rate of a large addition: forward x twice and y once, "
    "backward x and dy twice and dx once; a residual once forward, and backward y twice and its gradient once. Arrays "
    "in a cache are faster.",
)


@dataclasses.dataclass(frozen=True)
class Case:
    """The shape of x, whose channels are the last axis or the second."""

    shape: tuple[int, ...]
    dtype: str = "float32"
    channels_last: bool = True
    extra: bool = False
    activation: str | None = None
    residual: bool = False

    @property
    def feature_axis(self) -> int:
        return len(self.shape) - 1 if self.channels_last else 1

    @property
    def label(self) -> str:
        sizes = [f"C{n}" if axis == self.feature_axis else str(n) for axis, n in enumerate(self.shape)]
        settings = ({"float32": "", "bfloat16": "bf16"}[self.dtype], self.activation, "residual" * self.residual)
        return " ".join(["x".join(sizes), *filter(None, settings)])

    @property
    def passes(self) -> dict[str, int]:
        """The least number of times that an array as large as x is read or written."""
        return {"forward": 3 + self.residual, "forward+backward": 8 + 4 * self.residual}

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
_GPU_SHAPES = (
    (128, 112, 112, 64),
    (128, 56, 56, 64),
    (128, 56, 56, 256),
    (128, 28, 28, 128),
    (128, 28, 28, 512),
    (128, 14, 14, 256),
    (128, 14, 14, 1024),
    (128, 7, 7, 512),
    (128, 7, 7, 2048),
    (32, 8, 8, 16),
    (8, 14, 14, 256),
    (256, 512),
)
_GPU_CASES = (
    *(Case(shape, dtype) for shape in _GPU_SHAPES for dtype in ("float32", "bfloat16")),
    *(Case((128, 64, 56, 56), dtype, channels_last=False) for dtype in ("float32", "bfloat16")),
    *(
        Case(shape, "bfloat16", activation="relu", residual=residual)
        for shape in ((128, 28, 28, 128), (8, 14, 14, 256))
        for residual in (False, True)
    ),
)
CASES = {"cpu": _CPU_CASES, "gpu": _GPU_CASES}
QUICK_CASES = (
    Case((2, 8, 8, 16)),
    Case((2, 16, 8, 8), channels_last=False),
    Case((2, 8, 8, 16), "bfloat16", activation="relu", residual=True),
)


def parse_case(text: str) -> Case:
    """sizes joined by x, with C before the channels, last or second, and a dtype, relu or residual: 8x28xC128,relu"""
    sizes, *settings = text.split(",")
    parts = sizes.split("x")
    at = [i for i, part in enumerate(parts) if part.startswith("C")]
    valid = len(parts) > 1 and len(at) == 1 and at[0] in (1, len(parts) - 1)
    numbers = [part.removeprefix("C") for part in parts]
    dtypes = [setting for setting in settings if setting in ("float32", "bfloat16")]
    valid = valid and all(n.isdecimal() and int(n) > 0 for n in numbers) and len(dtypes) <= 1
    if not valid or set(settings) - {"float32", "bfloat16", "relu", "residual"}:
        raise argparse.ArgumentTypeError(f"must be {parse_case.__doc__}, got {text!r}")
    return Case(
        tuple(map(int, numbers)),
        dtypes[0] if dtypes else "float32",
        at[0] == len(parts) - 1,
        activation="relu" if "relu" in settings else None,
        residual="residual" in settings,
    )


def plain(x: jax.Array, scale: jax.Array, bias: jax.Array, *residual: jax.Array, case: Case) -> jax.Array:
    """Batch normalization with the variance in a second pass, which XLA fuses well."""
    axes = tuple(axis for axis in range(x.ndim) if axis != case.feature_axis)
    wide = x.astype(jnp.float32)
    mean = wide.mean(axes, keepdims=True)
    var = jnp.square(wide - mean).mean(axes, keepdims=True)
    scale, bias = (lax.expand_dims(a, axes) for a in (scale, bias))
    return _followed((wide - mean) * (scale * lax.rsqrt(var + 1e-5)) + bias, residual, case)


def with_var(x: jax.Array, scale: jax.Array, bias: jax.Array, *residual: jax.Array, case: Case) -> jax.Array:
    """Batch normalization with x.mean and x.var."""
    axes = tuple(axis for axis in range(x.ndim) if axis != case.feature_axis)
    wide = x.astype(jnp.float32)
    mean, var = wide.mean(axes, keepdims=True), wide.var(axes, keepdims=True)
    scale, bias = (lax.expand_dims(a, axes) for a in (scale, bias))
    return _followed((wide - mean) / jnp.sqrt(var + 1e-5) * scale + bias, residual, case)


def _followed(y: jax.Array, residual: tuple[jax.Array, ...], case: Case) -> jax.Array:
    y = y + residual[0] if residual else y
    return (jax.nn.relu(y) if case.activation else y).astype(case.dtype)


def measure(cases: Sequence[Case], options: Options) -> dict[str, Any]:
    """The report (report.py)."""
    left_out = torch_peers.left_out((TORCH_EAGER,), options)
    explanations = sorted({str(_explanation(case)) for case in cases})
    rows_of = partial(_rows, left_out=set(left_out), options=options)
    return measured("batch_norm", cases, rows_of, explanations, NOTES, left_out, one_line_a_case=True)


def _explanation(case: Case) -> Any:
    channels = jax.ShapeDtypeStruct((case.shape[case.feature_axis],), "float32")
    x = jax.ShapeDtypeStruct(case.shape, case.dtype)
    return jaxgrad.explain(jaxgrad.batch_norm_training, x, channels, channels, feature_axis=case.feature_axis)


def _rows(case: Case, left_out: set[str], options: Options) -> list[dict[str, Any]]:
    inputs, dy = arrays_of(case)

    layers = {
        OURS: layer_of(case),
        OURS_ON_XLA: layer_of(case, implementation="xla"),
        NUMPY_FUSED: partial(plain, case=case),
        NUMPY_VAR: partial(with_var, case=case),
    }
    if _explanation(case).implementation == "xla":
        del layers[OURS_ON_XLA]  # the same program as jaxgrad's
    layers = {name: layer for name, layer in layers.items() if options.wants(name)}
    contenders = {
        "forward": jax_contenders([Call(name, layer, inputs) for name, layer in layers.items()]),
        "forward+backward": jax_contenders(
            [Call(name, gradients(layer), (inputs, dy)) for name, layer in layers.items()]
        ),
    }
    if options.wants(TORCH_EAGER) and TORCH_EAGER not in left_out:
        call = NormCall(case.label, case.dtype, case.shape, case.feature_axis, case.activation)
        for which, (function, outputs) in torch_peers.passes(call, (*inputs, dy)).items():
            contenders[which].append(torch_contender(TORCH_EAGER, function, outputs(function)))
    return [compare(work_of(case, which), those, options.effort) for which, those in contenders.items()]


def layer_of(case: Case, implementation: str | None = None) -> Callable[..., jax.Array]:
    """y of jaxgrad.batch_norm_training, as a function of x, scale, bias and the residual if the case has one."""

    def layer(x: jax.Array, scale: jax.Array, bias: jax.Array, *residual: jax.Array) -> jax.Array:
        return jaxgrad.batch_norm_training(
            x,
            scale,
            bias,
            residual=residual[0] if residual else None,
            feature_axis=case.feature_axis,
            activation=case.activation,
            implementation=implementation,
        )[0]

    return layer


def work_of(case: Case, which: str) -> Work:
    return Work(
        label=case.label,
        measure=which,
        settings=dataclasses.asdict(case),
        dtype=case.dtype,
        flops=0,
        array_bytes={"x": case.array_bytes},
        extra=case.extra,
        bytes_moved=case.array_bytes * case.passes[which],
    )


def arrays_of(case: Case) -> tuple[tuple[jax.Array, ...], jax.Array]:
    keys = jax.random.split(jax.random.key(0), 5)
    channels = (case.shape[case.feature_axis],)
    x, dy, residual = (jax.random.normal(key, case.shape).astype(case.dtype) for key in keys[:3])
    scale, bias = (jax.random.normal(key, channels, jnp.float32) for key in keys[3:])
    return (x, 1 + scale / 2, bias, *([residual] if case.residual else [])), dy


def gradients(layer: Callable[..., jax.Array]) -> Callable[..., Any]:
    """y, and the gradients of sum(y dy) with respect to the inputs."""

    def run(inputs: tuple[jax.Array, ...], dy: jax.Array) -> tuple[jax.Array, ...]:
        y, pullback = jax.vjp(layer, *inputs)
        return y, *pullback(dy)

    return run
