"""The CPU backend of normalization: jaxgrad's C++ kernels in ffi/cpu/batch_norm.

The channels of all calls are the channels of one kernel call.

The kernels merge blocks whose size and order are fixed, so that results do not depend on the number of threads.
"""

from __future__ import annotations

import math
from typing import Any

import jax

from jaxgrad._src.choice.op import Rejection
from jaxgrad._src.native import cpu
from jaxgrad._src.native.ffi import empty_if_none, empty_like, ffi_call
from jaxgrad._src.norm.backend import Gradients, TwoStepBackend, compute_dtype
from jaxgrad._src.norm.params import NormParams, NormProblem
from jaxgrad._src.run.batching import fold, unfold


class CpuBackend(TwoStepBackend):
    implementation = "cpu"
    platform = "cpu"
    title = "CPU kernels"
    description = "the CPU kernel supports every dtype and shape of this op"

    def unavailable(self) -> str:
        return cpu.unavailable()

    def supports(self, pass_name: str, call: NormProblem) -> Rejection | None:
        if call.num_groups is not None or call.activation not in (None, "relu"):
            return Rejection("the CPU kernels support batch normalization without an activation or with relu")
        return None

    def statistics(self, params, x):
        calls, x, axis = x.shape[0], fold(x, params.feature_axis), params.feature_axis
        channels = _channels(params, x)
        found = ffi_call(
            "jaxgrad_cpu_batch_norm_statistics",
            [channels] * 4,
            (x,),
            _workspace(params, x),
            named={"x": x, "mean": channels},
            feature_axis=axis,
            epsilon=params.epsilon,
        )
        mean, mean_low, var, rstd = (unfold(each, 0, calls) for each in found)
        return mean, mean_low, var, rstd

    def normalize(self, params, x, scale, bias, statistics, residual):
        axis = params.feature_axis
        calls, x, residual = x.shape[0], fold(x, axis), None if residual is None else fold(residual, axis)
        arrays: list[Any] = [None if a is None else fold(a, 0) for a in (scale, bias, *statistics)]
        scale, bias, mean, mean_low, rstd = arrays
        (y,) = ffi_call(
            "jaxgrad_cpu_batch_norm_normalize",
            (jax.ShapeDtypeStruct(x.shape, x.dtype),),
            (x, scale, bias, mean, empty_if_none(mean_low, mean.dtype), rstd, empty_if_none(residual, x.dtype)),
            _workspace(params, x),
            named={"x": x, "mean": mean},
            feature_axis=axis,
            relu=params.activation == "relu",
        )
        return unfold(y, axis, calls)

    def backward(self, params, x, scale, bias, statistics, y, residual, dy, dmean, dvar, *, needs_grad):
        axis = params.feature_axis
        calls, (x, y, dy) = x.shape[0], (None if a is None else fold(a, axis) for a in (x, y, dy))
        arrays: list[Any] = [None if a is None else fold(a, 0) for a in (scale, bias, *statistics, dmean, dvar)]
        scale, bias, mean, mean_low, rstd, dmean, dvar = arrays
        like_x, channels = jax.ShapeDtypeStruct(x.shape, x.dtype), _channels(params, x)
        found = ffi_call(
            "jaxgrad_cpu_batch_norm_backward",
            [
                shape if needed else empty_like(shape)
                for shape, needed in zip((like_x, channels, channels, like_x), needs_grad, strict=True)
            ],
            (
                x,
                scale,
                empty_if_none(bias, channels.dtype),
                mean,
                empty_if_none(mean_low, channels.dtype),
                rstd,
                empty_if_none(y, x.dtype),
                dy,
                empty_if_none(dmean, channels.dtype),
                empty_if_none(dvar, channels.dtype),
            ),
            _workspace(params, x),
            named={"x": x, "mean": mean},
            feature_axis=axis,
            frozen=params.frozen,
            relu=params.activation == "relu",
        )
        each = zip(found, (axis, 0, 0, axis), needs_grad, strict=True)
        return Gradients(*(unfold(gradient, at, calls) if needed else None for gradient, at, needed in each))


def _channels(params: NormParams, x: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((x.shape[params.feature_axis],), compute_dtype(x))


def _workspace(params: NormParams, x: jax.Array) -> int:
    outer, inner = math.prod(x.shape[: params.feature_axis]), math.prod(x.shape[params.feature_axis + 1 :])
    return cpu.module.batch_norm_workspace(outer, x.shape[params.feature_axis], inner, x.dtype.itemsize)
