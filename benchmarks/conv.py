"""Convolution and transposed convolution: forward, the gradient of the input (dX) and that of the weights (dW)."""

from __future__ import annotations

import argparse
import dataclasses
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

import jaxgrad
from benchmarks import environment
from benchmarks.compare import Work, compare
from benchmarks.report import OURS
from benchmarks.timing import Contender, Effort, jax_contender, torch_contender, why_not_torch

BASELINE = "jax.lax"
TORCH = "torch"
NOTES = (
    "Cases are batch x sizes, input features -> output features, k the window, s the stride, d the window's dilation, "
    "g the groups, p the padding, T a transposed convolution, and the layout.",
    "dX and dW are calls that compute this one gradient.",
    "The floor is the larger of two times: of as many operations in large matrix products, and of reading and writing "
    "each array once at the rate of a large addition.",
)


@dataclasses.dataclass(frozen=True)
class Case:
    """A convolution whose window, stride, dilation and padding are the same on every spatial axis."""

    spatial: tuple[int, ...]
    batch: int
    features: int
    out_features: int
    window: int
    stride: int = 1
    dilation: int = 1
    groups: int = 1
    padding: int = 0
    transposed: bool = False
    channels_last: bool = True
    dtype: str = "float32"

    @property
    def layout(self) -> str:
        axes = "DHW"[3 - len(self.spatial) :]
        return f"N{axes}C" if self.channels_last else f"NC{axes}"

    @property
    def dimension_numbers(self) -> tuple[str, str, str]:
        axes = "DHW"[3 - len(self.spatial) :]
        return self.layout, f"{axes}IO" if self.channels_last else f"OI{axes}", self.layout

    @property
    def label(self) -> str:
        optional = {"s": (self.stride, 1), "d": (self.dilation, 1), "g": (self.groups, 1), "p": (self.padding, 0)}
        words = [
            "x".join(map(str, (self.batch, *self.spatial))),
            f"{self.features}->{self.out_features}",
            f"k{self.window}",
            *(f"{letter}{value}" for letter, (value, usual) in optional.items() if value != usual),
            *(["T"] if self.transposed else []),
            self.layout,
        ]
        return " ".join([*words, *(["bf16"] if self.dtype == "bfloat16" else [])])

    def settings(self) -> dict[str, Any]:
        """The keyword arguments of the convolution, past lhs and rhs."""
        n = len(self.spatial)
        # jax.lax counts the padding of the convolution that a transposed one is computed by, torch that of the one
        # that it transposes: `padding` is the latter.
        own = self.dilation * (self.window - 1) - self.padding if self.transposed else self.padding
        common = {
            "padding": [(own, own)] * n,
            "rhs_dilation": (self.dilation,) * n,
            "dimension_numbers": self.dimension_numbers,
        }
        if self.transposed:
            return {"strides": (self.stride,) * n, **common}
        return {"window_strides": (self.stride,) * n, "feature_group_count": self.groups, **common}

    def shapes(self) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """Those of x, w and y."""
        reach = self.dilation * (self.window - 1) + 1
        out = [
            (size - 1) * self.stride + reach - 2 * self.padding
            if self.transposed
            else (size + 2 * self.padding - reach) // self.stride + 1
            for size in self.spatial
        ]
        window = (self.window,) * len(self.spatial)
        inner = self.features // self.groups

        def activations(features: int, sizes: Sequence[int]) -> tuple[int, ...]:
            return (self.batch, *sizes, features) if self.channels_last else (self.batch, features, *sizes)

        w = (*window, inner, self.out_features) if self.channels_last else (self.out_features, inner, *window)
        return activations(self.features, self.spatial), w, activations(self.out_features, out)

    @property
    def flops(self) -> int:
        """Every element of the smaller picture meets the whole window, but for the padding."""
        x, _, y = self.shapes()
        places = math.prod(x) // self.features if self.transposed else math.prod(y) // self.out_features
        taps = self.window ** len(self.spatial)
        return 2 * places * taps * self.features * self.out_features // self.groups


def _both_layouts(*cases: Case) -> tuple[Case, ...]:
    return tuple(dataclasses.replace(case, channels_last=last) for case in cases for last in (True, False))


_CPU_CASES = _both_layouts(
    Case((56, 56), 8, 128, 128, 3, groups=32, padding=1),
    Case((56, 56), 8, 96, 96, 7, groups=96, padding=3),
    Case((56, 56), 8, 64, 64, 3, padding=1),
    Case((56, 56), 8, 256, 64, 1),
    Case((224, 224), 8, 3, 64, 7, stride=2, padding=3),
    Case((56, 56), 8, 128, 128, 3, stride=2, padding=1),
    Case((56, 56), 8, 64, 64, 3, dilation=4, padding=4),
    Case((28, 28), 8, 1, 32, 3, padding=1),
    Case((4096,), 8, 128, 128, 3, dilation=8, padding=8),
    Case((16, 16, 16), 2, 32, 64, 3, padding=1),
    Case((28, 28), 8, 64, 32, 2, stride=2, transposed=True),
    Case((16, 16), 8, 64, 32, 4, stride=2, padding=1, transposed=True),
    Case((8, 8), 1, 1, 1, 3, padding=1),
    Case((8, 8), 1, 8, 8, 3, padding=1),
)
_GPU_CASES = tuple(
    dataclasses.replace(case, dtype=dtype)
    for dtype in ("bfloat16", "float32")
    for case in (
        Case((16384,), 8, 128, 128, 3, dilation=8, padding=8),
        Case((64, 64), 16, 256, 256, 3, dilation=4, padding=4),
        Case((64, 64), 16, 256, 128, 2, stride=2, transposed=True),
        Case((8, 8), 128, 512, 256, 4, stride=2, padding=1, transposed=True),
        Case((56, 56), 64, 96, 96, 7, groups=96, padding=3),
        Case((7, 7), 64, 1024, 1024, 3, groups=32, padding=1),
        Case((64, 64, 64), 2, 32, 64, 3, padding=1),
        Case((56, 56), 64, 64, 64, 3, padding=1),
        Case((56, 56), 64, 256, 64, 1),
        Case((224, 224), 64, 3, 64, 7, stride=2, padding=3),
        Case((56, 56), 64, 128, 128, 3, stride=2, padding=1),
    )
)
CASES = {"cpu": _CPU_CASES, "gpu": _GPU_CASES}
QUICK_CASES = _both_layouts(
    Case((9, 9), 2, 8, 4, 3, stride=2, groups=2, padding=1),
    Case((5,), 2, 4, 8, 3, stride=2, padding=1, transposed=True),
)
_NUMBERS = {"k": "window", "s": "stride", "d": "dilation", "g": "groups", "p": "padding"}
_DTYPES = {"bf16": "bfloat16", "f32": "float32"}


def parse_case(text: str) -> Case:
    """sizes, features and settings as the tables label them, joined by commas: 8x56x56,128->128,k3,s2,g32,p1,T,NCHW"""
    sizes, _, rest = text.partition(",")
    features, *words = rest.split(",")
    found = re.fullmatch(r"(\d+)->(\d+)", features)
    values: dict[str, Any] = {}
    valid = re.fullmatch(r"\d+(x\d+){1,3}", sizes) is not None and found is not None
    for word in words:
        if (number := re.fullmatch(r"([ksdgp])(\d+)", word)) is not None:
            values[_NUMBERS[number[1]]] = int(number[2])
        elif word == "T":
            values["transposed"] = True
        elif re.fullmatch(r"N(C[DHW]+|[DHW]+C)", word):
            values["channels_last"] = word.endswith("C")
        elif word in _DTYPES:
            values["dtype"] = _DTYPES[word]
        else:
            valid = False
    if not valid or "window" not in values:
        raise argparse.ArgumentTypeError(f"must be {parse_case.__doc__}, got {text!r}")
    assert found is not None
    batch, *spatial = map(int, sizes.split("x"))
    case = Case(tuple(spatial), batch, int(found[1]), int(found[2]), **values)
    if case.groups < 1 or case.features % case.groups or case.out_features % case.groups:
        raise argparse.ArgumentTypeError(f"the groups must divide the features, got {text!r}")
    if case.transposed and case.groups > 1:
        raise argparse.ArgumentTypeError(f"jax.lax has no transposed convolution with groups, got {text!r}")
    return case


def measure(cases: Sequence[Case], effort: Effort) -> dict[str, Any]:
    """The report, as report.py wants it."""
    left_out = {}
    if (reason := why_not_torch()) is not None:
        left_out[TORCH] = reason
        print(f"left out: {TORCH} ({reason})")
    rows = []
    for case in cases:
        print(case.label, flush=True)
        rows += _rows(case, set(left_out), effort)
    return {
        "op": "conv",
        "environment": environment.describe(),
        "implementation": str(jaxgrad.explain(jaxgrad.conv_general_dilated)),
        "left_out": left_out,
        "notes": NOTES,
        "one_line_a_case": True,
        "rows": rows,
    }


def _rows(case: Case, left_out: set[str], effort: Effort) -> list[dict[str, Any]]:
    arrays = _arrays(case)
    settings = case.settings()
    ours = jaxgrad.conv_transpose if case.transposed else jaxgrad.conv_general_dilated
    theirs = lax.conv_transpose if case.transposed else lax.conv_general_dilated
    taken = str(jaxgrad.explain(ours, *arrays[:2], **settings))
    contenders: dict[str, list[Contender]] = {"forward": [], "dX": [], "dW": []}
    for name, op in ((OURS, ours), (BASELINE, theirs)):
        for which, function in _passes(op, settings).items():
            contenders[which].append(jax_contender(name, function, *arrays))
    if TORCH not in left_out:
        from benchmarks import torch_conv

        on_gpu = jax.default_backend() == "gpu"
        for which, (function, outputs) in torch_conv.passes(case, *arrays, on_gpu=on_gpu).items():
            contenders[which].append(torch_contender(TORCH, function, outputs, on_gpu))
    return [{**compare(_work(case, which), those, effort), "taken": taken} for which, those in contenders.items()]


def _passes(op: Callable[..., jax.Array], settings: dict[str, Any]) -> dict[str, Callable[..., jax.Array]]:
    """Functions of x, w and dy."""
    return {
        "forward": lambda x, w, dy: op(x, w, **settings),
        "dX": lambda x, w, dy: jax.vjp(lambda x: op(x, w, **settings), x)[1](dy)[0],
        "dW": lambda x, w, dy: jax.vjp(lambda w: op(x, w, **settings), w)[1](dy)[0],
    }


def _work(case: Case, which: str) -> Work:
    itemsize = jnp.dtype(case.dtype).itemsize
    sizes = {name: math.prod(shape) * itemsize for name, shape in zip("xwy", case.shapes(), strict=True)}
    return Work(
        label=case.label,
        measure=which,
        settings=dataclasses.asdict(case),
        dtype=case.dtype,
        flops=case.flops,
        array_bytes=sizes,
        bytes_moved=sum(sizes.values()),
    )


def _arrays(case: Case) -> tuple[jax.Array, jax.Array, jax.Array]:
    """x, w and dy."""
    keys = jax.random.split(jax.random.key(0), 3)
    x, w, dy = (
        jax.random.normal(key, shape).astype(case.dtype) for key, shape in zip(keys, case.shapes(), strict=True)
    )
    return x, w, dy
