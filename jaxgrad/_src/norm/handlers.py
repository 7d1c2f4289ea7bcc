"""The backends of normalization whose kernels are jaxgrad's own: calls of the handlers in ffi/*/norm.

The handlers of both platforms have the same operands, results and attributes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import numpy as np

from jaxgrad._src.native.ffi import empty_if_none, empty_like, ffi_call
from jaxgrad._src.norm.backend import Gradients, TwoStepBackend, compute_dtype
from jaxgrad._src.norm.params import NormParams, NormProblem

_ACTIVATIONS = (None, "relu", "silu", "gelu")  # by the number that the handlers take, see ffi/common/norm_shape.h


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A kernel of a pass.

    Attributes:
      name: "forward", "statistics", "normalize" or "backward".
      sizes: S, O, C, I, G and K.
      dtype: the dtype of x.
      activation: its number.
      centered, frozen: as in `NormParams`.
      residual: whether a residual is added, or its gradient is a result.
      third: the array by which the backward pass knows the argument of the activation: 1 for y, 2 for the residual; 0
        if it is x alone.
      needs_dx: whether the backward pass computes dx.
      needs_sums: whether it computes dscale or dbias.
    """

    name: str
    sizes: tuple[int, ...]
    dtype: np.dtype
    activation: int = 0
    centered: bool = True
    frozen: bool = False
    residual: bool = False
    third: int = 0
    needs_dx: bool = True
    needs_sums: bool = True


def kernel_of(call: NormProblem, pass_name: str) -> Kernel:
    """The kernel of a pass of a call."""
    groups = call.num_groups or call.channels
    sizes = (call.calls * call.samples, call.outer, call.channels, call.inner, groups, call.calls)
    activation = _ACTIVATIONS.index(call.activation)
    name, third = "normalize" if call.frozen else "forward", 0
    if pass_name == "backward":
        name = pass_name
        third = (1 if call.activation == "relu" else 2) if activation and call.residual else 0
    settings = (activation, call.centered, call.frozen, call.residual, third)
    return Kernel(name, sizes, np.dtype(call.dtype), *settings)


class HandlerBackend(TwoStepBackend):
    """A backend whose handlers are named `target` and the name of the kernel."""

    target: ClassVar[str]

    def workspace(self, kernel: Kernel) -> int:
        """Returns the bytes of workspace of a call."""
        raise NotImplementedError

    def statistics(self, params, x):
        call = _Call(self, params, x)
        attributes = {"epsilon": params.epsilon, "centered": params.centered}
        found = call.run(call.kernel("statistics", activation=0), call.statistics(), (call.x,), **attributes)
        return call.unfolded(found)

    def normalize(self, params, x, scale, bias, statistics, residual):
        call = _Call(self, params, x)
        operands = (call.x, scale, bias, *call.folded(statistics), call.like_x_or_empty(residual))
        kernel = call.kernel("normalize", centered=statistics.mean is not None, residual=residual is not None)
        (y,) = call.run(kernel, (call.x_shape,), operands, activation=call.activation)
        return y.reshape(x.shape)

    def forward(self, params, x, scale, bias, residual):
        call = _Call(self, params, x)
        y, *found = call.run(
            call.kernel("forward", residual=residual is not None),
            (call.x_shape, *call.statistics()),
            (call.x, scale, bias, call.like_x_or_empty(residual)),
            epsilon=params.epsilon,
            activation=call.activation,
            centered=params.centered,
        )
        return y.reshape(x.shape), *call.unfolded(found)

    def backward(self, params, x, scale, bias, statistics, y, residual, dy, dmean, dvar, *, needs_grad):
        call = _Call(self, params, x)
        channels = jax.ShapeDtypeStruct(scale.shape, call.dtype)
        results = (call.x_shape, channels, channels, call.x_shape)
        needs_dx, needs_dscale, needs_dbias, needs_dresidual = needs_grad
        third = 0 if params.activation is None else 1 if y is not None else 2 if residual is not None else 0
        kernel = call.kernel(
            "backward",
            residual=needs_dresidual,
            third=third,
            needs_dx=needs_dx,
            needs_sums=needs_dscale or needs_dbias,
            frozen=params.frozen,
        )
        found = call.run(
            kernel,
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

    def __init__(self, backend: HandlerBackend, params: NormParams, x: jax.Array) -> None:
        problem = params.problem(x)
        groups = problem.num_groups or problem.channels
        sizes = (problem.calls * problem.samples, problem.outer, problem.channels, problem.inner)
        self.dtype = compute_dtype(x)
        self.x = x.reshape(sizes)
        self.x_shape = jax.ShapeDtypeStruct(sizes, x.dtype)
        self.activation = _ACTIVATIONS.index(params.activation)
        self._backend = backend
        self._centered = params.centered
        self._sizes = (*sizes, groups, problem.calls)
        self._statistic = jax.ShapeDtypeStruct((sizes[0], groups), self.dtype)
        self._unfolded = (*x.shape[: 1 + params.sample_axes], groups)

    def kernel(self, name: str, **settings: Any) -> Kernel:
        settings = {"activation": self.activation, "centered": self._centered} | settings
        return Kernel(name, self._sizes, np.dtype(self.x.dtype), **settings)

    def run(
        self, kernel: Kernel, results: Sequence[Any], operands: Sequence[Any], **attributes: Any
    ) -> list[jax.Array]:
        target, workspace = f"{self._backend.target}_{kernel.name}", self._backend.workspace(kernel)
        named = {"x": self.x, "rstd": self._statistic}
        return ffi_call(target, results, operands, workspace, named=named, **attributes)

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
        found = [a.reshape(self._unfolded) if a.size else None for a in statistics]
        return tuple(found)
