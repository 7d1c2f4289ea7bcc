"""Random equations of `jax.lax.conv_general_dilated`, and their results in float64 by NumPy."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax import lax
from tolerances import DTYPES

_DTYPES = ("float32", "float32", "bfloat16", "float16")  # float32 as often as the other two


@dataclasses.dataclass(frozen=True)
class EquationCase:
    """One equation: its operands, and its parameters as JAX stores them."""

    lhs: np.ndarray
    rhs: np.ndarray
    parameters: dict[str, Any]
    result: jax.ShapeDtypeStruct

    def on_lax(self, lhs: jax.Array, rhs: jax.Array) -> jax.Array:
        return lax.conv_general_dilated(lhs, rhs, **self.parameters)

    @property
    def terms(self) -> int:
        """The length of the longest sum."""
        return self.rhs.size // self.rhs.shape[self.parameters["dimension_numbers"].rhs_spec[0]]

    def __str__(self) -> str:
        return f"{self.lhs.dtype}{self.lhs.shape} {self.rhs.shape} -> {self.result}: {self.parameters}"


def random_equations(seed: int, count: int) -> Iterator[EquationCase]:
    """Equations whose sizes, layouts and other parameters are all random, and whose results have elements."""
    rng = np.random.default_rng(seed)
    while count:
        if (case := _random_equation(rng)) is not None:
            count -= 1
            yield case


def _random_equation(rng: np.random.Generator) -> EquationCase | None:
    n = int(rng.integers(1, 4))

    def draw(low: int, high: int, size: int = n) -> tuple[int, ...]:
        return tuple(rng.integers(low, high, size).tolist())

    def usually_one(probability: float) -> tuple[int, ...]:
        return draw(1, 4) if rng.random() < probability else (1,) * n

    def operand(spec: tuple[int, ...], sizes: tuple[int, ...]) -> np.ndarray:
        return np.moveaxis(rng.standard_normal(sizes), range(n + 2), spec).astype(dtype)

    dtype = DTYPES[_DTYPES[rng.integers(4)]]
    widened = dtype.itemsize == 2 and rng.random() < 0.3
    groups = {"feature_group_count": 1, "batch_group_count": 1}
    kind = rng.choice(["feature_group_count", "batch_group_count", "", ""])
    if kind:
        groups[kind] = int(rng.integers(2, 4))
    batch, features, out_features = draw(1, 5, 3)
    lhs_spec, rhs_spec, out_spec = (tuple(rng.permutation(n + 2).tolist()) for _ in range(3))
    lhs_sizes = batch * groups["batch_group_count"], features * groups["feature_group_count"], *draw(1, 9)
    rhs_sizes = out_features * max(groups.values()), features, *draw(1, 7)
    parameters = {
        "window_strides": usually_one(0.5),
        "padding": tuple(zip(draw(-2, 7), draw(-2, 7), strict=True)),
        "lhs_dilation": usually_one(0.5),
        "rhs_dilation": usually_one(0.25),
        "dimension_numbers": lax.ConvDimensionNumbers(lhs_spec, rhs_spec, out_spec),
        **groups,
        "precision": None,
        "preferred_element_type": np.dtype("float32") if widened else None,
    }
    lhs, rhs = operand(lhs_spec, lhs_sizes), operand(rhs_spec, rhs_sizes)
    try:
        result = jax.eval_shape(lambda lhs, rhs: lax.conv_general_dilated(lhs, rhs, **parameters), lhs, rhs)
    except (TypeError, ValueError):  # the window is larger than the padded input
        return None
    return EquationCase(lhs, rhs, parameters, result) if 0 not in result.shape else None


def in_float64(case: EquationCase) -> np.ndarray:
    """The result: a sum of products for each position, after dilation and padding are written out."""
    p = case.parameters
    lhs_spec, rhs_spec, out_spec = p["dimension_numbers"]
    x = _padded(_dilated(np.transpose(np.float64(case.lhs), lhs_spec), p["lhs_dilation"]), p["padding"])
    w = _dilated(np.transpose(np.float64(case.rhs), rhs_spec), p["rhs_dilation"])
    x = np.concatenate(np.split(x, p["batch_group_count"]), axis=1)  # batch groups as feature groups
    groups = max(p["feature_group_count"], p["batch_group_count"])
    windows = np.lib.stride_tricks.sliding_window_view(x, w.shape[2:], range(2, x.ndim))
    windows = windows[(..., *(slice(None, None, s) for s in p["window_strides"]), *[slice(None)] * (x.ndim - 2))]
    axes = (1, *range(x.ndim, windows.ndim)), tuple(range(1, x.ndim))
    parts = zip(np.split(windows, groups, axis=1), np.split(w, groups), strict=True)
    result = np.concatenate([np.moveaxis(np.tensordot(*part, axes), -1, 1) for part in parts], axis=1)
    return np.moveaxis(result, range(result.ndim), out_spec)


def _dilated(array: np.ndarray, dilation: tuple[int, ...]) -> np.ndarray:
    sizes = ((size - 1) * d + 1 for size, d in zip(array.shape[2:], dilation, strict=True))
    found = np.zeros((*array.shape[:2], *sizes))
    found[(..., *(slice(None, None, d) for d in dilation))] = array
    return found


def _padded(array: np.ndarray, padding: tuple[tuple[int, int], ...]) -> np.ndarray:
    padded = np.pad(array, [(0, 0), (0, 0), *((max(low, 0), max(high, 0)) for low, high in padding)])
    kept = (slice(max(-low, 0), -max(-high, 0) or None) for low, high in padding)
    return padded[(slice(None), slice(None), *kept)]
