"""The CPU backend of batch normalization: jaxgrad's C++ kernels in ffi/cpu/batch_norm.

The kernels merge blocks whose size and order are fixed, so that results do not depend on the number of threads.
"""

from __future__ import annotations

import jax

from jaxgrad._src.batch_norm.backend import Gradients, TwoStepBackend, compute_dtype
from jaxgrad._src.batch_norm.params import BatchNormParams, BatchNormProblem
from jaxgrad._src.native import cpu
from jaxgrad._src.native.ffi import empty_if_none, empty_like, ffi_call


class CpuBackend(TwoStepBackend):
    implementation = "cpu"
    platform = "cpu"
    title = "CPU kernels"
    description = "the CPU kernel supports every dtype and shape of this op"

    def unavailable(self) -> str:
        return cpu.unavailable()

    def statistics(self, params, x):
        channels = _channels(params, x)
        mean, mean_low, var, rstd = ffi_call(
            "jaxgrad_cpu_batch_norm_statistics",
            [channels] * 4,
            (x,),
            _workspace(params, x),
            named={"x": x, "mean": channels},
            feature_axis=params.feature_axis,
            epsilon=params.epsilon,
        )
        return mean, mean_low, var, rstd

    def normalize(self, params, x, scale, bias, statistics, residual):
        mean, mean_low, rstd = statistics
        (y,) = ffi_call(
            "jaxgrad_cpu_batch_norm_normalize",
            (jax.ShapeDtypeStruct(x.shape, x.dtype),),
            (x, scale, bias, mean, empty_if_none(mean_low, mean.dtype), rstd, empty_if_none(residual, x.dtype)),
            _workspace(params, x),
            named={"x": x, "mean": mean},
            feature_axis=params.feature_axis,
            relu=params.relu,
        )
        return y

    def backward(self, params, x, scale, bias, statistics, y, dy, dmean, dvar, *, needs_grad):
        like_x, channels = jax.ShapeDtypeStruct(x.shape, x.dtype), _channels(params, x)
        mean, mean_low, rstd = statistics
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
            feature_axis=params.feature_axis,
            frozen=params.frozen,
            relu=params.relu,
        )
        return Gradients(*(g if needed else None for g, needed in zip(found, needs_grad, strict=True)))


def _channels(params: BatchNormParams, x: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((x.shape[params.feature_axis],), compute_dtype(x))


def _workspace(params: BatchNormParams, x: jax.Array) -> int:
    problem = BatchNormProblem.of(x, params.feature_axis)
    return cpu.module.batch_norm_workspace(problem.outer, problem.channels, problem.inner, x.dtype.itemsize)
