"""Random inputs for the tests of `conv_transpose`, and a reference from `jax.lax`, group by group."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from conv_cases import ConvInputs, draw, draw_sizes, laid_out
from conv_references import with_bias
from jax import lax

CHANNELS_LAST = {n: (f"N{s}C", f"{s}IO", f"N{s}C") for n, s in {0: "", 1: "H", 2: "HW", 3: "HWD"}.items()}


@dataclasses.dataclass(frozen=True)
class TransposeCase:
    """One call of `conv_transpose`; `features` and `out_features` are per group."""

    spatial: tuple[int, ...] = (4, 6)
    window: tuple[int, ...] = (3, 2)
    batch: int = 2
    features: int = 3
    out_features: int = 5
    groups: int = 1
    strides: tuple[int, ...] | None = None
    padding: Any = "SAME"
    rhs_dilation: tuple[int, ...] | None = None
    layout: tuple[str, str, str] | None = None
    as_object: bool = False
    bias: bool = True
    transpose_kernel: bool = False
    use_consistent_padding: bool = False
    output_padding: Any = 0
    seed: int = 0

    @property
    def n(self) -> int:
        return len(self.spatial)

    @property
    def numbers(self) -> lax.ConvDimensionNumbers:
        rank = (0,) * (self.n + 2)
        return lax.conv_dimension_numbers(rank, rank, self.layout or CHANNELS_LAST[self.n])

    @property
    def shapes(self) -> ConvInputs:
        numbers, G, out = self.numbers, self.groups, self.out_features * self.groups
        lhs = laid_out(numbers.lhs_spec, (self.batch, self.features * G, *self.spatial))
        sizes = (self.features * G, self.out_features) if self.transpose_kernel else (out, self.features)
        return ConvInputs(lhs, laid_out(numbers.rhs_spec, (*sizes, *self.window)), (out,) if self.bias else None)

    @property
    def lax_settings(self) -> dict[str, Any]:
        """The keyword arguments that `jax.lax.conv_transpose` also takes."""
        return {
            "strides": self.strides or (1,) * self.n,
            "padding": self.padding,
            "rhs_dilation": self.rhs_dilation,
            "dimension_numbers": self.numbers if self.as_object else self.layout,
            "transpose_kernel": self.transpose_kernel,
            "use_consistent_padding": self.use_consistent_padding,
        }

    @property
    def settings(self) -> dict[str, Any]:
        own = {"feature_group_count": self.groups, "output_padding": self.output_padding}
        return {**self.lax_settings, **own}

    def replace(self, **changes: Any) -> TransposeCase:
        return dataclasses.replace(self, **changes)


def make_transpose_inputs(case: TransposeCase, dtype: str = "float32") -> ConvInputs:
    return draw(case.shapes, case.features * int(np.prod(case.window)), dtype, case.seed)


def lax_conv_transpose(case: TransposeCase) -> Callable[..., Any]:
    """`jax.lax.conv_transpose` of each group in turn. Output padding is added to the padding at the high end."""
    settings, numbers = case.lax_settings, case.numbers
    if np.any(case.output_padding):
        added = np.broadcast_to(case.output_padding, case.n) * (-1 if case.use_consistent_padding else 1)
        settings["padding"] = tuple(
            (low, high + int(more)) for (low, high), more in zip(case.padding, added, strict=True)
        )

    def op(lhs, rhs):
        lhs = jnp.split(lhs, case.groups, numbers.lhs_spec[1])
        rhs = jnp.split(rhs, case.groups, numbers.rhs_spec[0])
        ys = [lax.conv_transpose(x, w, **settings) for x, w in zip(lhs, rhs, strict=True)]
        return jnp.concatenate(ys, numbers.out_spec[1])

    return with_bias(op, numbers.out_spec[1])


def result_shape(case: TransposeCase) -> tuple[int, ...]:
    shapes = [None if shape is None else jax.ShapeDtypeStruct(shape, np.float32) for shape in case.shapes]
    return jax.eval_shape(lax_conv_transpose(case), *shapes).shape


def random_transpose_case(seed: int) -> TransposeCase:
    rng = np.random.default_rng([seed, 7])
    while True:
        n = int(rng.choice([1, 2, 2, 3]))
        sizes = draw_sizes(rng, n)
        sizes["spatial"] = tuple(max(1, size // 2) for size in sizes["spatial"])
        case = TransposeCase(
            **sizes,
            strides=tuple(map(int, rng.integers(1, 4, n))),
            padding=_random_padding(rng, n),
            transpose_kernel=bool(rng.random() < 0.5),
            use_consistent_padding=bool(rng.random() < 0.5),
            seed=seed,
        )
        if not isinstance(case.padding, str) and rng.random() < 0.3:
            most = [max(s, d) for s, d in zip(case.strides, case.rhs_dilation or (1,) * n, strict=True)]
            case = case.replace(output_padding=tuple(int(rng.integers(0, m)) for m in most))
        try:
            shape = result_shape(case)
        except ValueError:  # negative padding beyond the array
            continue
        if 0 not in shape and np.prod(shape) < 20000:
            return case


def _random_padding(rng: np.random.Generator, n: int) -> Any:
    if rng.random() < 0.4:
        return str(rng.choice(["SAME", "VALID"]))
    low, high = [(0, 3), (-2, 3), (-3, 6)][rng.integers(3)]
    return tuple((int(a), int(b)) for a, b in rng.integers(low, high, (n, 2)))
