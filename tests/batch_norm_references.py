"""Reference for batch normalization: the textbook formula in float64, differentiated by JAX.

Inputs are random, with unequal sizes and a nonzero mean. They are rounded to the dtypes under test before the reference
reads them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from backends import CUDNN, float64_on_cpu
from tolerances import assert_close, input_dtype

import jaxgrad

EPSILON = 3e-3  # large enough that a result without it fails


class Inputs(NamedTuple):
    x: Any
    scale: Any
    bias: Any
    residual: Any


class Results(NamedTuple):
    y: Any
    mean: Any
    var: Any


@dataclasses.dataclass(frozen=True)
class Case:
    """One call: its shape and settings, and the dtypes of x, of scale and bias, and of the statistics."""

    shape: tuple[int, ...] = (5, 3, 4, 6)
    feature_axis: int = -1
    residual: bool = False
    activation: str | None = None
    dtypes: tuple[str, str, str] = ("float32", "float32", "float32")
    seed: int = 0

    @property
    def C(self) -> int:  # noqa: N802
        return self.shape[self.feature_axis]

    @property
    def terms(self) -> int:
        return math.prod(self.shape) // max(self.C, 1)

    @property
    def settings(self) -> dict[str, Any]:
        return {"feature_axis": self.feature_axis, "epsilon": EPSILON, "activation": self.activation}

    def replace(self, **changes: Any) -> Case:
        return dataclasses.replace(self, **changes)

    def __str__(self) -> str:
        extra = [self.activation or "", "residual" if self.residual else "", *dict.fromkeys(self.dtypes)]
        return f"{'x'.join(map(str, self.shape))}-axis{self.feature_axis}-" + "-".join(filter(None, extra))


def make_inputs(case: Case) -> tuple[Inputs, Results]:
    """The inputs, and cotangents of (y, mean, var). Those of mean and var are large, to matter beside dy."""
    rng = np.random.default_rng([case.seed, *case.shape])
    x_dtype, scale_dtype, statistics_dtype = (input_dtype(name) for name in case.dtypes)

    def normal(mean: float, deviation: float, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        return (mean + deviation * rng.standard_normal(shape)).astype(dtype)

    x, residual = normal(0.7, 1.4, case.shape, x_dtype), normal(0.2, 1, case.shape, x_dtype)
    scale, bias = normal(1.2, 0.5, (case.C,), scale_dtype), normal(0.1, 0.6, (case.C,), scale_dtype)
    cotangents = Results(
        normal(0.2, 1, case.shape, x_dtype),
        normal(0, case.terms, (case.C,), statistics_dtype),
        normal(0, case.terms, (case.C,), statistics_dtype),
    )
    return Inputs(x, scale, bias, residual if case.residual else None), cotangents


def spread(array: Any, ndim: int, axis: int) -> Any:
    shape = [1] * ndim
    shape[axis] = -1
    return array.reshape(shape)


def plain_training(x, scale, bias, residual=None, *, feature_axis, epsilon=1e-5, activation=None) -> Results:
    axes = tuple(np.delete(np.arange(x.ndim), feature_axis).tolist())
    mean = jnp.mean(x, axes)
    var = jnp.mean((x - spread(mean, x.ndim, feature_axis)) ** 2, axes)
    y = plain_inference(x, scale, bias, mean, var, feature_axis=feature_axis, epsilon=epsilon)
    if residual is not None:
        y = y + residual
    return Results(y if activation is None else getattr(jax.nn, activation)(y), mean, var)


def plain_inference(x, scale, bias, mean, var, *, feature_axis, epsilon=1e-5):
    scale, bias, mean, var = (spread(a, x.ndim, feature_axis) for a in (scale, bias, mean, var))
    return scale * (x - mean) / jnp.sqrt(var + epsilon) + bias


def in_float64(tree: Any) -> Any:
    return jax.tree.map(lambda a: np.asarray(a).astype(np.float64), tree)


def training(backend: Any) -> Callable[..., Results]:
    def call(*args: Any, **kwargs: Any) -> Results:
        return Results(*jaxgrad.batch_norm_training(*args, **kwargs, implementation=backend.implementation))

    return call


def skip_without_kernels(backend: Any, activation: str) -> None:
    """Skips the test if the backend has no kernels with the activation."""
    arrays = [jax.ShapeDtypeStruct(shape, "float32") for shape in ((8, 4), (4,), (4,))]
    settings = {"activation": activation, "implementation": backend.implementation, "platform": backend.platform}
    try:
        jaxgrad.explain(jaxgrad.batch_norm_training, *arrays, **settings)
    except ValueError as error:
        pytest.skip(str(error))


def inference(backend: Any) -> Callable[..., Any]:
    """Skips the test if `explain` reports that the backend has no kernel for inference."""
    if backend == CUDNN:
        with pytest.raises(ValueError, match="the implementations of this op are"):
            jaxgrad.explain(jaxgrad.batch_norm_inference, implementation="cudnn", platform="gpu")
        pytest.skip("batch_norm_inference has no cuDNN kernels")
    return partial(jaxgrad.batch_norm_inference, implementation=backend.implementation)


def values_and_gradients(
    function: Callable[..., Any], inputs: Any, cotangents: Any, requested: Any = None
) -> tuple[Any, Any]:
    """`(results, gradients)` of function(*inputs), jitted. A result whose cotangent is None is not differentiated.

    `requested` lists the positions of the differentiated inputs; None stands for all inputs that are not None. The
    gradients of the other inputs are None.
    """
    if requested is None:
        requested = [i for i, value in enumerate(inputs) if value is not None]

    @jax.jit
    def run(inputs, cotangents):
        def outputs(values):
            given = list(inputs)
            for i, value in zip(requested, values, strict=True):
                given[i] = value
            results = function(*given)
            used = [r for r, c in zip(jax.tree.leaves(results), cotangents, strict=True) if c is not None]
            return used, results

        _, pullback, results = jax.vjp(outputs, [inputs[i] for i in requested], has_aux=True)
        (gradients,) = pullback([c for c in cotangents if c is not None])
        return results, gradients

    results, found = run(tuple(inputs), tuple(cotangents))
    gradients: list[Any] = [None] * len(inputs)
    for i, gradient in zip(requested, found, strict=True):
        gradients[i] = gradient
    return results, tuple(gradients)


def reference(function: Callable[..., Any], inputs: Any, cotangents: Any) -> tuple[Any, Any]:
    """`values_and_gradients` in float64, at the same rounded inputs."""
    with float64_on_cpu():
        return values_and_gradients(function, *in_float64((inputs, cotangents)))


def check_training(backend: Any, case: Case) -> None:
    """Values and all gradients of a case against the reference."""
    inputs, cotangents = make_inputs(case)
    if backend == CUDNN and case.activation and case.residual:
        cotangents = cotangents._replace(y=_away_from_zero(case, inputs, cotangents.y))
    x_dtype, scale_dtype, statistics_dtype = case.dtypes
    call = partial(training(backend), **case.settings, statistics_dtype=statistics_dtype)

    def ours(x, scale, bias, residual):
        return call(x, scale, bias, residual=residual)

    results, gradients = values_and_gradients(ours, *backend.put((inputs, cotangents)))
    expected, expected_gradients = reference(partial(plain_training, **case.settings), inputs, cotangents)
    names = ("y", "mean", "var", *(f"the gradient of {name}" for name in Inputs._fields))
    dtypes = (x_dtype, statistics_dtype, statistics_dtype, x_dtype, scale_dtype, scale_dtype, x_dtype)
    pairs = zip(names, dtypes, (*results, *gradients), (*expected, *expected_gradients), strict=True)
    for name, dtype, actual, desired in pairs:
        if desired is not None:
            assert_close(actual, desired, dtype=dtype, terms=case.terms, name=name)


def _away_from_zero(case: Case, inputs: Inputs, dy: np.ndarray) -> np.ndarray:
    """dy, zero for elements whose relu mask depends on whether x is rounded before the residual is added."""
    settings = {"feature_axis": case.feature_axis, "epsilon": EPSILON}
    residual = np.asarray(inputs.residual, np.float64)
    with float64_on_cpu():
        addend = np.asarray(plain_training(*in_float64(inputs[:3]), **settings).y)
    ulp = float(jnp.finfo(case.dtypes[0]).eps)
    return np.where(np.abs(addend + residual) < 2 * ulp * np.abs(addend), 0, dy).astype(dy.dtype)
