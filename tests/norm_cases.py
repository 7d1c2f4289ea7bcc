"""Calls of `group_norm`, `layer_norm` and `rms_norm`, and their reference: the textbook formula in float64.

Inputs are random, with unequal sizes and a mean that is not zero, and rounded to the dtypes under test before the
reference reads them.
"""

from __future__ import annotations

import dataclasses
import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from batch_norm_references import EPSILON, reference, values_and_gradients
from tolerances import assert_close, input_dtype

import jaxgrad


class Inputs(NamedTuple):
    x: Any
    scale: Any
    bias: Any
    residual: Any


@dataclasses.dataclass(frozen=True)
class NormCase:
    """One call, and the dtypes of x and of the parameters.

    Attributes:
      op: the name of the op.
      shape: of x.
      axis: the feature axis of group norm, or the normalized axes.
      given: the arrays of the call beside x.
    """

    op: str = "group_norm"
    shape: tuple[int, ...] = (3, 5, 4, 6)
    axis: int | tuple[int, ...] = -1
    num_groups: int = 2
    given: tuple[str, ...] = ("scale", "bias")
    activation: str | None = None
    dtypes: tuple[str, str] = ("float32", "float32")
    epsilon: float = EPSILON
    seed: int = 0

    def replace(self, **changes: Any) -> NormCase:
        return dataclasses.replace(self, **changes)

    def on(self, backend: Any) -> NormCase:
        """The case with the widest dtype of the backend in place of float64."""
        x, scale = (backend.widest if dtype == "float64" else dtype for dtype in self.dtypes)
        return self.replace(dtypes=(x, scale))

    @property
    def settings(self) -> dict[str, Any]:
        groups = {"num_groups": self.num_groups, "feature_axis": self.axis}
        own = groups if self.op == "group_norm" else {"axis": self.axis}
        return {**own, "epsilon": self.epsilon, "activation": self.activation}

    @property
    def axes(self) -> tuple[int, ...]:
        """The axes of the parameters."""
        axes = self.axis if isinstance(self.axis, tuple) else (self.axis,)
        return tuple(sorted(axis % len(self.shape) for axis in axes))

    @property
    def parameter_shape(self) -> tuple[int, ...]:
        return tuple(self.shape[axis] for axis in self.axes)

    def call(self, implementation: str | None = None) -> Any:
        """The op as a function of `Inputs`. Skips the test if the backend has no kernels for it."""
        op = partial(getattr(jaxgrad, self.op), **self.settings, implementation=implementation)
        if implementation in ("cpu", "cuda"):
            platform = "gpu" if implementation == "cuda" else "cpu"
            shapes = [jax.ShapeDtypeStruct(shape, "float32") for shape in (self.shape, *[self.parameter_shape] * 2)]
            try:
                jaxgrad.explain(op, *shapes, platform=platform)
            except ValueError as error:
                pytest.skip(str(error))
        return lambda x, scale=None, bias=None, residual=None: op(x, scale, bias, residual=residual)

    def plain(self, x: Any, scale: Any = None, bias: Any = None, residual: Any = None) -> Any:
        """The textbook formula."""
        grouped, axes = x, self.axes
        if self.op == "group_norm":
            (at,) = self.axes
            grouped = x.reshape(*x.shape[:at], self.num_groups, x.shape[at] // self.num_groups, *x.shape[at + 1 :])
            axes = tuple(axis for axis in range(1, grouped.ndim) if axis != at)
        if self.op != "rms_norm":
            grouped = grouped - jnp.mean(grouped, axes, keepdims=True)
        square = jnp.mean(jnp.square(grouped), axes, keepdims=True)
        y = (grouped / jnp.sqrt(square + self.epsilon)).reshape(x.shape)
        spread = [size if axis in self.axes else 1 for axis, size in enumerate(self.shape)]
        y = y if scale is None else y * scale.reshape(spread)
        y = y if bias is None else y + bias.reshape(spread)
        y = y if residual is None else y + residual
        return y if self.activation is None else getattr(jax.nn, self.activation)(y)

    def __str__(self) -> str:
        words = [self.op, "x".join(map(str, self.shape)), f"axis{self.axis}", self.activation or "", *self.given]
        return "-".join(filter(None, [*words, *dict.fromkeys(self.dtypes)]))


def make_inputs(case: NormCase) -> tuple[Inputs, Any]:
    """The inputs, None for those that are not given, and dy."""
    rng = np.random.default_rng([case.seed, *case.shape])
    dtypes = dict(zip(("x", "scale"), map(input_dtype, case.dtypes), strict=True))

    def normal(mean: float, deviation: float, shape: tuple[int, ...], like: str) -> np.ndarray:
        return (mean + deviation * rng.standard_normal(shape)).astype(dtypes[like])

    x, residual, dy = (normal(mean, 1.3, case.shape, "x") for mean in (0.7, 0.2, 0.2))
    parameters = {
        "scale": normal(1.2, 0.5, case.parameter_shape, "scale"),
        "bias": normal(0.1, 0.6, case.parameter_shape, "scale"),
        "residual": residual,
    }
    return Inputs(x, *(array if name in case.given else None for name, array in parameters.items())), dy


def check(backend: Any, case: NormCase) -> None:
    """The value and all gradients of a case against the reference."""
    case = case.on(backend)
    inputs, dy = make_inputs(case)
    call = case.call(backend.implementation)
    y, gradients = values_and_gradients(lambda *a: (call(*a),), *backend.put((inputs, (dy,))))
    expected, expected_gradients = reference(lambda *a: (case.plain(*a),), inputs, (dy,))
    # The reference has the errors of float64 too, and the derivative of `jax.nn.gelu` cancels far from zero.
    terms = math.prod(case.shape) * (256 if case.dtypes[0] == "float64" or case.activation == "gelu" else 1)
    names = ("y", *(f"the gradient of {name}" for name in Inputs._fields))
    dtypes = (case.dtypes[0], case.dtypes[0], case.dtypes[1], case.dtypes[1], case.dtypes[0])
    for name, dtype, found, desired in zip(
        names, dtypes, (*y, *gradients), (*expected, *expected_gradients), strict=True
    ):
        if desired is not None:
            assert_close(found, desired, dtype=dtype, terms=terms, name=name)


def random_case(seed: int) -> NormCase:
    """A small call whose sizes fit nothing. A group has several elements: dx of one element is a rounding error."""
    rng = np.random.default_rng(seed)
    op = ("group_norm", "layer_norm", "rms_norm")[seed % 3]
    rank = int(rng.integers(2 if op == "group_norm" else 1, 5))
    largest = (300, 40, 14, 8)[rank - 1]
    shape = [int(size) for size in rng.integers(1, largest, rank)]
    axis: Any
    num_groups = 1
    if op == "group_norm":
        axis = int(rng.choice([1, rank - 1, rng.integers(1, rank)]))
        num_groups = int(rng.choice([1, 2, 3, 4, 8]))
        alone = math.prod(shape[1:]) == shape[axis]
        shape[axis] = num_groups * int(rng.choice([1, 1, 2, 3, 4, 8, 9, 17][3 * alone :]))
    else:
        first = int(rng.integers(0, rank))
        axis = tuple(range(first, rank))
        if rng.random() < 0.3:
            axis = tuple(int(i) for i in rng.permutation(rank)[: int(rng.integers(1, rank + 1))])
    x_dtype = str(rng.choice(["float32", "float32", "float64", "bfloat16", "float16"]))
    return NormCase(
        op=op,
        shape=tuple(shape),
        axis=axis,
        num_groups=num_groups,
        given=tuple(name for name in ("scale", "bias", "residual") if rng.random() < 0.7),
        activation=(None, "relu", "silu", "gelu")[int(rng.integers(4))],
        dtypes=(x_dtype, x_dtype if x_dtype == "float64" or rng.random() < 0.5 else "float32"),
        seed=seed,
    )
