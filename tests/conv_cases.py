"""Random inputs for the tests of the convolutions: H != W, C_in != C_out, every layout."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import numpy as np
from jax import lax
from tolerances import input_dtype

SPATIAL = {0: "", 1: "W", 2: "HW", 3: "DHW", 4: "TDHW"}
FIELDS = ("lhs", "rhs", "bias")


class ConvInputs(NamedTuple):
    """The array arguments of both ops."""

    lhs: Any
    rhs: Any
    bias: Any = None


@dataclasses.dataclass(frozen=True)
class ConvCase:
    """One call of `conv_general_dilated`; `features` and `out_features` are per group."""

    spatial: tuple[int, ...] = (7, 9)
    window: tuple[int, ...] = (3, 2)
    batch: int = 2
    features: int = 3
    out_features: int = 5
    groups: int = 1
    strides: tuple[int, ...] | None = None
    padding: Any = None
    lhs_dilation: tuple[int, ...] | None = None
    rhs_dilation: tuple[int, ...] | None = None
    layout: tuple[str, str, str] | None = None
    as_object: bool = False
    bias: bool = True
    seed: int = 0

    @property
    def n(self) -> int:
        return len(self.spatial)

    @property
    def numbers(self) -> lax.ConvDimensionNumbers:
        rank = (0,) * (self.n + 2)
        return lax.conv_dimension_numbers(rank, rank, self.layout)

    @property
    def shapes(self) -> ConvInputs:
        n, G, out = self.numbers, self.groups, self.out_features * self.groups
        lhs = laid_out(n.lhs_spec, (self.batch, self.features * G, *self.spatial))
        rhs = laid_out(n.rhs_spec, (out, self.features, *self.window))
        return ConvInputs(lhs, rhs, (out,) if self.bias else None)

    @property
    def settings(self) -> dict[str, Any]:
        """The keyword arguments of `jax.lax.conv_general_dilated`."""
        return {
            "window_strides": self.strides or (1,) * self.n,
            "padding": ((0, 0),) * self.n if self.padding is None else self.padding,
            "lhs_dilation": self.lhs_dilation,
            "rhs_dilation": self.rhs_dilation,
            "dimension_numbers": self.numbers if self.as_object else self.layout,
            "feature_group_count": self.groups,
        }

    def replace(self, **changes: Any) -> ConvCase:
        return dataclasses.replace(self, **changes)


def laid_out(spec: tuple[int, ...], sizes: tuple[int, ...]) -> tuple[int, ...]:
    shape = [0] * len(spec)
    for axis, size in zip(spec, sizes, strict=True):
        shape[axis] = size
    return tuple(shape)


def layout(kind: str, n: int, rng: np.random.Generator | None = None) -> tuple[str, str, str] | None:
    """Dimension numbers for n spatial axes; `permuted` draws a random order for each operand."""
    s = SPATIAL[n]
    if kind == "permuted":
        assert rng is not None
        return tuple("".join(rng.permutation(list(letters + s))) for letters in ("NC", "OI", "NC"))
    return {
        "default": None,
        "first": (f"NC{s}", f"OI{s}", f"NC{s}"),
        "last": (f"N{s}C", f"{s}IO", f"N{s}C"),
        "mixed": (f"NC{s}", f"{s}IO", f"NC{s}"),
    }[kind]


LAYOUT_KINDS = ("default", "first", "last", "mixed", "permuted")


def draw_sizes(rng: np.random.Generator, n: int) -> dict[str, Any]:
    """Sizes and layout of a random case of either op. Some cases have enough features for kernels that block them."""
    kind = LAYOUT_KINDS[rng.integers(5)]
    groups = int(rng.choice([1, 1, 1, 2, 3, 8]))
    depthwise = groups > 1 and rng.random() < 0.4
    wide = rng.random() < 0.2
    most = {1: 30, 2: 12, 3: 7}[n]
    return {
        "spatial": tuple(map(int, rng.integers(2, most, n))),
        "window": tuple(map(int, rng.integers(1, 6 if n == 1 else 5 if n == 2 else 4, n))),
        "batch": int(rng.choice([1, 2, 3])),
        "features": 1 if depthwise else int(16 if wide else rng.integers(1, 7)),
        "out_features": int(rng.integers(1, 4) if depthwise else 32 if wide else rng.integers(1, 8)),
        "groups": groups,
        "rhs_dilation": tuple(map(int, rng.integers(1, 4, n))) if rng.random() < 0.4 else None,
        "layout": layout(kind, n, rng),
        "as_object": bool(rng.random() < 0.3),
        "bias": bool(rng.random() < 0.7),
    }


def random_case(seed: int) -> ConvCase:
    """A random case with a nonempty result: plain, strided, with a dilated input, or both; any form of padding."""
    rng = np.random.default_rng(seed)
    while True:
        n = int(rng.choice([1, 2, 2, 3]))
        kind = rng.choice(["plain", "strided", "spread", "both"], p=[0.3, 0.4, 0.25, 0.05])
        case = ConvCase(
            **draw_sizes(rng, n),
            strides=tuple(map(int, rng.integers(1, 4, n))) if kind in ("strided", "both") else None,
            lhs_dilation=tuple(map(int, rng.integers(1, 4, n))) if kind in ("spread", "both") else None,
            seed=seed,
        )
        case = case.replace(padding=_random_padding(rng, case))
        if min(result_sizes(case)) > 0 and np.prod(result_sizes(case)) < 4000:
            return case


def _random_padding(rng: np.random.Generator, case: ConvCase) -> Any:
    if case.lhs_dilation is None and rng.random() < 0.4:
        return str(rng.choice(["SAME", "SAME_LOWER", "VALID"]))
    low, high = [(0, 3), (0, 3), (-2, 3), (-2, 3), (-2, 9)][
        rng.integers(5)
    ]  # up to 8, which is larger than most windows
    return tuple((int(a), int(b)) for a, b in rng.integers(low, high, (case.n, 2)))


def result_sizes(case: ConvCase) -> tuple[int, ...]:
    """The spatial sizes of the result, computed from the sizes of each axis."""
    strides, spread, dilation = (v or (1,) * case.n for v in (case.strides, case.lhs_dilation, case.rhs_dilation))
    extents = [(k - 1) * d + 1 for k, d in zip(case.window, dilation, strict=True)]
    sizes = [(size - 1) * d + 1 for size, d in zip(case.spatial, spread, strict=True)]
    padding = case.settings["padding"]
    if isinstance(padding, str):
        padding = lax.padtype_to_pads(sizes, extents, strides, padding)
    return tuple(
        max(0, (size + low + high - k) // s + 1)
        for size, k, s, (low, high) in zip(sizes, extents, strides, padding, strict=True)
    )


def draw(shapes: ConvInputs, fan_in: int, dtype: str, seed: int) -> ConvInputs:
    """Random NumPy arrays. The weights are scaled such that the results are near 1."""
    rng = np.random.default_rng([seed, 1])
    scales = ConvInputs(1.0, fan_in**-0.5, 1.0)
    return ConvInputs(
        *(
            None if shape is None else (scale * rng.standard_normal(shape)).astype(input_dtype(dtype))
            for shape, scale in zip(shapes, scales, strict=True)
        )
    )


def make_conv_inputs(case: ConvCase, dtype: str = "float32") -> ConvInputs:
    fan_in = max(1, case.features * int(np.prod(case.window)))
    return draw(case.shapes, fan_in, dtype, case.seed)


def cotangent(shape: tuple[int, ...], dtype: str, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, 2]).standard_normal(shape).astype(input_dtype(dtype))
