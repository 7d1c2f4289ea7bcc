"""The kernel calls of batch normalisation, each jitted and with its rule for `vmap`.

Every operand and result has the axis of the channels, and channels are independent: a mapped axis is folded into them,
which is exact and takes one call. A unit without elements, or with nothing for a kernel to read, runs on XLA.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import jax

from jaxgrad import _batch_norm_cudnn, _batch_norm_xla, _ffi
from jaxgrad._batch_norm_xla import Statistics
from jaxgrad._batching import fold_or_loop
from jaxgrad._dispatch import Route
from jaxgrad._partitioning import Devices, Dims, Layout, jitted, on_own_part, over_mesh


@dataclasses.dataclass(frozen=True)
class Spec:
    """The static arguments of one call."""

    feature_axis: int  # not negative
    epsilon: float
    relu: bool
    statistics_dtype: Any
    forward: Route
    backward: Route
    devices: Devices | None = None  # whose parts make up the batch, inside shard_map

    def over(self, means: Any) -> Any:
        """The averages over those devices of a tree of arrays, each device's own where there are none."""
        return means if self.devices is None else self.devices.mean(means)


def _route(route: Route, x: jax.Array) -> Route:
    """What is left of the route for the x that a unit was given, which vmap may have made larger than the call's."""
    if x.size == 0:
        return route.on_xla()
    # Only sizes that are known now are asked about: where one is a symbol the route holds no kernels.
    return route.without("cudnn") if "cudnn" in route.kernels and not _batch_norm_cudnn.takes(x) else route


def _kernel_route(spec: Spec, x: jax.Array) -> Route:
    """That of the passes which have a kernel on the CPU alone."""
    found = _route(spec.forward, x)
    return found.without("cudnn") if not found.forced or "cpu" in found.kernels else found.on_xla()


def _names(spec: Spec, x: jax.Array) -> Dims:
    """Any dimension of x may be split over a mesh: C, that of the channels, and the others."""
    return tuple("C" if axis == spec.feature_axis else f"N{axis}" for axis in range(x.ndim))


def _summed(spec: Spec, x: jax.Array) -> tuple[str, ...]:
    """The dimensions that statistics, and gradients of channels, are summed over."""
    return tuple(name for name in _names(spec, x) if name is not None and name != "C")


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

    def across(devices):
        return partial(_forward_across, spec, devices)

    def call(x, *rest):
        if spec.devices is not None:
            return across(spec.devices)(x, *rest)
        layout = Layout(
            (_names(spec, x), ("C",), ("C",), _names(spec, x)), (_names(spec, x), *[("C",)] * 4), _summed(spec, x)
        )
        kernels = {"cpu": cpu, "cudnn": cudnn}
        return over_mesh(layout, lambda x, *_: _route(spec.forward, x), kernels, xla, across, lambda *_: True)(x, *rest)

    unit = fold_or_loop(call, in_axes=(axis, 0, 0, axis), out_axes=(axis, 0, 0, 0, 0))
    return jitted(unit, "batch_norm_forward", spec)


@cache
def normalise(spec: Spec) -> Callable[..., Any]:
    """(x, scale, bias, mean, mean_low, rstd, residual) -> (y,); mean_low and residual may be None."""
    settings: dict[str, Any] = {"feature_axis": spec.feature_axis, "relu": spec.relu}

    def cpu(*arrays):
        return (_ffi.batch_norm_normalise(*arrays, **settings),)

    def xla(x, scale, bias, mean, mean_low, rstd, residual):
        return (_batch_norm_xla.normalise(x, scale, bias, Statistics(mean, mean_low, rstd), residual, **settings),)

    def call(x, *rest):
        layout = Layout((_names(spec, x), *[("C",)] * 5, _names(spec, x)), (_names(spec, x),))
        return over_mesh(layout, lambda x, *_: _kernel_route(spec, x), {"cpu": cpu}, xla)(x, *rest)

    axis = spec.feature_axis
    unit = fold_or_loop(call, in_axes=(axis, 0, 0, 0, 0, 0, axis), out_axes=(axis,))
    return jitted(unit, "batch_norm_normalise", spec)


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

    def route(x, scale, bias, mean, mean_low, rstd, y, dy, dmean, dvar):
        found = _route(spec.backward, x) if dy is not None and any(wanted) else spec.backward.on_xla()
        return found if wanted[0] else found.without("cudnn")  # XLA leaves out what dx alone needs

    def across(devices):
        return partial(_backward_across, spec, devices, wanted)

    def call(x, *rest):
        if spec.devices is not None:
            return across(spec.devices)(x, *rest)
        channels, like_x = ("C",), _names(spec, x)
        operands = (like_x, *[channels] * 5, like_x, like_x, channels, channels)
        results = [
            name if want else None for name, want in zip((like_x, channels, channels, like_x), wanted, strict=True)
        ]
        layout = Layout(operands, tuple(results), _summed(spec, x))
        kernels = {"cpu": cpu, "cudnn": cudnn}
        # XLA would gather the parts of sums.
        return over_mesh(layout, route, kernels, xla, None if frozen else across, lambda *_: True)(x, *rest)

    axis = spec.feature_axis
    in_axes = (axis, 0, 0, 0, 0, 0, axis, axis, 0, 0)
    unit = fold_or_loop(call, in_axes=in_axes, out_axes=(axis, 0, 0, axis))
    return jitted(unit, "batch_norm_backward", spec, frozen, wanted)


# --- a batch that lies on several devices, of which x is one's part -----------------------------------------------


def _forward_across(spec: Spec, devices: Devices, x: Any, scale: Any, bias: Any, residual: Any) -> tuple[Any, ...]:
    """The unit `forward`, with the statistics of the whole batch."""
    axis, route = spec.feature_axis, _kernel_route(spec, x)
    by_x: dict[str, Any] = {"feature_axis": axis, "epsilon": spec.epsilon}
    kernels = {"cpu": partial(_ffi.batch_norm_statistics, **by_x)}
    mean, mean_low, var, _ = on_own_part(route, kernels, partial(_batch_norm_xla.statistics, **by_x), x)
    own, over = (mean, mean_low, var), devices.mean
    if devices.count <= _FEW_DEVICES:  # one exchange instead of two
        own, over = devices.rows(own), _mean_of_rows
    found = _batch_norm_xla.combined(*own, epsilon=spec.epsilon, over=over)
    mean, mean_low, var, rstd = found
    (y,) = normalise(spec)(x, scale, bias, mean, mean_low, rstd, residual)
    return y, mean, mean_low, var, rstd


def _mean_of_rows(arrays: Any) -> Any:
    return jax.tree.map(lambda rows: rows.mean(0), arrays)


_FEW_DEVICES = 16  # whose statistics, a row each, take little longer to exchange than one row does


def _backward_across(
    spec: Spec,
    devices: Devices,
    wanted: tuple[bool, ...],
    x: Any,
    scale: Any,
    bias: Any,
    mean: Any,
    mean_low: Any,
    rstd: Any,
    y: Any,
    dy: Any,
    dmean: Any,
    dvar: Any,
) -> tuple[Any, ...]:
    """The unit `backward`: a kernel adds up what this device has, and XLA computes dx from the sums of all.

    dscale and dbias are those sums. Inside `shard_map` they are this device's own: JAX adds them up where they belong
    to arrays that all devices share.
    """
    own = dataclasses.replace(spec, backward=_kernel_route(spec, x), devices=None)
    _, dscale, dbias, _ = backward(own, False, (False, True, True, False))(
        x, scale, bias, mean, mean_low, rstd, y, dy, None, None
    )
    total_bias, total_scale = devices.sum((dbias, dscale))
    if spec.devices is None:
        dscale, dbias = total_scale, total_bias
    else:
        dmean, dvar = (devices.sum_of_cotangents(cotangent, x) for cotangent in (dmean, dvar))
    found = _batch_norm_xla.backward(
        x,
        scale,
        bias,
        Statistics(mean, mean_low, rstd),
        y,
        dy,
        dmean,
        dvar,
        feature_axis=spec.feature_axis,
        frozen=False,
        relu=spec.relu,
        wanted=wanted,
        sums=(total_bias, total_scale),
        devices=devices.count,
    )
    gradients = (found.x, dscale, dbias, found.residual)
    return tuple(gradient if want else None for gradient, want in zip(gradients, wanted, strict=True))
