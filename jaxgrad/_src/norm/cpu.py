"""The CPU backend of normalization: jaxgrad's C++ kernels in ffi/cpu/norm, which support every call.

The kernels merge blocks whose size and order are fixed, so that results do not depend on the number of threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from jaxgrad._src.native import cpu
from jaxgrad._src.native.ffi import empty_if_none, empty_like, ffi_call
from jaxgrad._src.norm.backend import Gradients, TwoStepBackend, compute_dtype
from jaxgrad._src.norm.params import NormParams

_ACTIVATIONS = (None, "relu", "silu", "gelu")  # by the number that the handlers take, see ffi/common/norm_shape.h


class CpuBackend(TwoStepBackend):
    implementation = "cpu"
    platform = "cpu"
    title = "CPU kernels"
    description = "the CPU kernel supports every dtype and shape of this op"

    def unavailable(self) -> str:
        return cpu.unavailable()

    def statistics(self, params, x):
        call = _Call(params, x)
        found = call.run("statistics", call.statistics(), (call.x,), epsilon=params.epsilon, centered=params.centered)
        return call.unfolded(found)

    def normalize(self, params, x, scale, bias, statistics, residual):
        call = _Call(params, x)
        operands = (call.x, scale, bias, *call.folded(statistics), call.like_x_or_empty(residual))
        (y,) = call.run("normalize", (call.x_shape,), operands, activation=call.activation)
        return y.reshape(x.shape)

    def forward(self, params, x, scale, bias, residual):
        if params.num_groups is None:  # a large sample leaves the cache between the steps, and one may not be needed
            return super().forward(params, x, scale, bias, residual)
        call = _Call(params, x)
        y, *found = call.run(
            "forward",
            (call.x_shape, *call.statistics()),
            (call.x, scale, bias, call.like_x_or_empty(residual)),
            epsilon=params.epsilon,
            activation=call.activation,
            centered=params.centered,
        )
        return y.reshape(x.shape), *call.unfolded(found)

    def backward(self, params, x, scale, bias, statistics, y, residual, dy, dmean, dvar, *, needs_grad):
        call = _Call(params, x)
        channels = jax.ShapeDtypeStruct(scale.shape, call.dtype)
        results = (call.x_shape, channels, channels, call.x_shape)
        found = call.run(
            "backward",
            [shape if needed else empty_like(shape) for shape, needed in zip(results, needs_grad, strict=True)],
            (
                call.x,
                scale,
                empty_if_none(bias, call.dtype),
                *call.folded(statistics),
                *map(call.like_x_or_empty, (y, residual, dy)),
                *call.folded((dmean, dvar)),
            ),
            frozen=params.frozen,
            centered=params.centered,
            activation=call.activation,
        )
        shapes = (x.shape, scale.shape, scale.shape, x.shape)
        each = zip(found, shapes, needs_grad, strict=True)
        return Gradients(*(gradient.reshape(shape) if needed else None for gradient, shape, needed in each))


class _Call:
    """The arrays of a call, as the handlers take them: x as [S, O, C, I], and statistics as [S, G]."""

    def __init__(self, params: NormParams, x: jax.Array) -> None:
        problem = params.problem(x)
        groups = problem.num_groups or problem.channels
        sizes = (problem.calls * problem.samples, problem.outer, problem.channels, problem.inner)
        self.dtype = compute_dtype(x)
        self.x = x.reshape(sizes)
        self.x_shape = jax.ShapeDtypeStruct(sizes, x.dtype)
        self.activation = _ACTIVATIONS.index(params.activation)
        self._centered = params.centered
        self._statistic = jax.ShapeDtypeStruct((sizes[0], groups), self.dtype)
        self._unfolded = (*x.shape[: 1 + params.sample_axes], groups)
        self._workspace = cpu.module.norm_workspace(*sizes, groups, problem.calls, x.dtype.itemsize)

    def run(self, name: str, results: Sequence[Any], operands: Sequence[Any], **attributes: Any) -> list[jax.Array]:
        named = {"x": self.x, "rstd": self._statistic}
        return ffi_call(f"jaxgrad_cpu_norm_{name}", results, operands, self._workspace, named=named, **attributes)

    def like_x_or_empty(self, array: jax.Array | None) -> jax.Array:
        return empty_if_none(None if array is None else array.reshape(self.x.shape), self.x.dtype)

    def statistics(self) -> list[jax.ShapeDtypeStruct]:
        """The results mean, mean_low, var and rstd."""
        mean = self._statistic if self._centered else empty_like(self._statistic)
        return [mean, mean, self._statistic, self._statistic]

    def folded(self, statistics: Sequence[jax.Array | None]) -> list[jax.Array]:
        shape = self._statistic.shape
        return [empty_if_none(None if a is None else a.reshape(shape), self.dtype) for a in statistics]

    def unfolded(self, statistics: Sequence[jax.Array]) -> tuple[Any, ...]:
        """Returns (mean, mean_low, var, rstd)."""
        return tuple(a.reshape(self._unfolded) if a.size else None for a in statistics)
