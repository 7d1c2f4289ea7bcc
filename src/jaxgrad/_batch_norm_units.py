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

from jaxgrad import _batch_norm_xla, _ffi
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
    route: Route


def _run(spec: Spec, has_work: bool, kernel: Callable[..., Any], xla: Callable[..., Any], *arrays: Any) -> Any:
    return by_platform(spec.route if has_work else XLA, {"cpu": kernel}, xla, *arrays)


@cache
def statistics(spec: Spec) -> Callable[..., Any]:
    """x -> (mean, mean_low, var, rstd), each [C]."""
    settings: dict[str, Any] = {"feature_axis": spec.feature_axis, "epsilon": spec.epsilon}

    def kernel(x):
        return _ffi.batch_norm_statistics(x, **settings)

    def xla(x):
        return _batch_norm_xla.statistics(x, **settings)

    def call(x):
        return _run(spec, x.size > 0, kernel, xla, x)

    return jax.jit(fold_or_loop(call, in_axes=(spec.feature_axis,), out_axes=(0, 0, 0, 0)))


@cache
def normalise(spec: Spec) -> Callable[..., Any]:
    """(x, scale, bias, mean, mean_low, rstd, residual) -> (y,); mean_low and residual may be None."""
    settings: dict[str, Any] = {"feature_axis": spec.feature_axis, "relu": spec.relu}

    def kernel(*arrays):
        return (_ffi.batch_norm_normalise(*arrays, **settings),)

    def xla(x, scale, bias, mean, mean_low, rstd, residual):
        return (_batch_norm_xla.normalise(x, scale, bias, Statistics(mean, mean_low, rstd), residual, **settings),)

    def call(x, *rest):
        return _run(spec, x.size > 0, kernel, xla, x, *rest)

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

    def kernel(*arrays):
        gradients = _ffi.batch_norm_backward(*arrays, **settings)
        return tuple(g if want else None for g, want in zip(gradients, wanted, strict=True))

    def xla(x, scale, bias, mean, mean_low, rstd, *rest):
        return tuple(_batch_norm_xla.backward(x, scale, bias, Statistics(mean, mean_low, rstd), *rest, **settings))

    def call(x, scale, bias, mean, mean_low, rstd, y, dy, dmean, dvar):
        has_work = x.size > 0 and dy is not None and any(wanted)
        return _run(spec, has_work, kernel, xla, x, scale, bias, mean, mean_low, rstd, y, dy, dmean, dvar)

    axis = spec.feature_axis
    in_axes = (axis, 0, 0, 0, 0, 0, axis, axis, 0, 0)
    return jax.jit(fold_or_loop(call, in_axes=in_axes, out_axes=(axis, 0, 0, axis)))
