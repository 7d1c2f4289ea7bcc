"""The kernel calls of batch normalisation, each jitted and with its rule for `vmap`.

Every operand and result has the axis of the channels, and channels are independent: a mapped axis is folded into them,
which is exact and takes one call. A unit without elements, or with nothing for a kernel to read, runs on XLA.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import cache
from typing import Any

import jax

from jaxgrad import _batch_norm_cudnn, _batch_norm_xla, _ffi
from jaxgrad._batch_norm_xla import Statistics
from jaxgrad._batching import fold_or_loop
from jaxgrad._dispatch import XLA, Route, by_platform


@dataclasses.dataclass(frozen=True)
class Spec:
    """The static arguments of one call."""

    feature_axis: int  # not negative
    epsilon: float
    relu: bool
    statistics_dtype: Any
    forward: Route
    backward: Route


def _route(route: Route, x: jax.Array) -> Route:
    """What is left of the route for the x that a unit was given, which vmap may have made larger than the call's."""
    if x.size == 0:
        return XLA
    # Only sizes that are known now are asked about: where one is a symbol the route holds no kernels.
    return route.without("cudnn") if "cudnn" in route.kernels and not _batch_norm_cudnn.takes(x) else route


@cache
def forward(spec: Spec) -> Callable[..., Any]:
    """(x, scale, bias, residual) -> (y, mean, mean_low, var, rstd), all but y of [C]; residual may be None.

    Where y is not read, XLA leaves the part that computes it out; cuDNN computes all at once.
    """
    axis = spec.feature_axis
    by_x: dict[str, Any] = {"feature_axis": axis, "epsilon": spec.epsilon}
    by_y: dict[str, Any] = {"feature_axis": axis, "relu": spec.relu}

    def cpu(x, scale, bias, residual):
        mean, mean_low, var, rstd = _ffi.batch_norm_statistics(x, **by_x)
        return (
            _ffi.batch_norm_normalise(x, scale, bias, mean, mean_low, rstd, residual, **by_y),
            mean,
            mean_low,
            var,
            rstd,
        )

    def cudnn(*arrays):
        return _batch_norm_cudnn.forward(*arrays, **by_x, relu=spec.relu)

    def xla(x, scale, bias, residual):
        mean, mean_low, var, rstd = _batch_norm_xla.statistics(x, **by_x)
        y = _batch_norm_xla.normalise(x, scale, bias, Statistics(mean, mean_low, rstd), residual, **by_y)
        return y, mean, mean_low, var, rstd

    def call(x, *rest):
        return by_platform(_route(spec.forward, x), {"cpu": cpu, "cudnn": cudnn}, xla, x, *rest)

    return jax.jit(fold_or_loop(call, in_axes=(axis, 0, 0, axis), out_axes=(axis, 0, 0, 0, 0)))


@cache
def normalise(spec: Spec) -> Callable[..., Any]:
    """(x, scale, bias, mean, mean_low, rstd, residual) -> (y,); mean_low and residual may be None."""
    settings: dict[str, Any] = {"feature_axis": spec.feature_axis, "relu": spec.relu}

    def cpu(*arrays):
        return (_ffi.batch_norm_normalise(*arrays, **settings),)

    def xla(x, scale, bias, mean, mean_low, rstd, residual):
        return (_batch_norm_xla.normalise(x, scale, bias, Statistics(mean, mean_low, rstd), residual, **settings),)

    def call(x, *rest):
        return by_platform(_route(spec.forward, x), {"cpu": cpu}, xla, x, *rest)

    axis = spec.feature_axis
    return jax.jit(fold_or_loop(call, in_axes=(axis, 0, 0, 0, 0, 0, axis), out_axes=(axis,)))


@cache
def backward(spec: Spec, frozen: bool, wanted: tuple[bool, ...]) -> Callable[..., Any]:
    """(x, scale, bias, mean, mean_low, rstd, y, dy, dmean, dvar) -> (dx, dscale, dbias, dresidual), None if not wanted.

    bias is read where relu followed no residual, y where it followed one; otherwise they are None. mean_low, dy, dmean
    and dvar may be None.
    """
    settings: dict[str, Any] = {
        "feature_axis": spec.feature_axis,
        "frozen": frozen,
        "relu": spec.relu,
        "wanted": wanted,
    }

    def cpu(*arrays):
        gradients = _ffi.batch_norm_backward(*arrays, **settings)
        return tuple(g if want else None for g, want in zip(gradients, wanted, strict=True))

    def cudnn(x, scale, bias, mean, mean_low, rstd, *rest):
        statistics = Statistics(mean, mean_low, rstd)
        by: dict[str, Any] = {
            "feature_axis": spec.feature_axis,
            "epsilon": spec.epsilon,
            "relu": spec.relu,
            "wanted": wanted,
        }
        return tuple(_batch_norm_cudnn.backward(x, scale, bias, statistics, *rest, **by))

    def xla(x, scale, bias, mean, mean_low, rstd, *rest):
        return tuple(_batch_norm_xla.backward(x, scale, bias, Statistics(mean, mean_low, rstd), *rest, **settings))

    def call(x, scale, bias, mean, mean_low, rstd, y, dy, dmean, dvar):
        route = _route(spec.backward, x) if dy is not None and any(wanted) else XLA
        if not wanted[0]:
            route = route.without("cudnn")  # XLA leaves out what dx alone needs
        arrays = (x, scale, bias, mean, mean_low, rstd, y, dy, dmean, dvar)
        return by_platform(route, {"cpu": cpu, "cudnn": cudnn}, xla, *arrays)

    axis = spec.feature_axis
    in_axes = (axis, 0, 0, 0, 0, 0, axis, axis, 0, 0)
    return jax.jit(fold_or_loop(call, in_axes=in_axes, out_axes=(axis, 0, 0, axis)))
