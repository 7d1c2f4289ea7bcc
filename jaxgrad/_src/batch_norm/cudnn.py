"""The calls of ffi/cuda/batch_norm_ffi.cc."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import jax
import numpy as np

from jaxgrad._ffi.batch_norm import _channels
from jaxgrad._ffi.registration import cuda, gpu_ordinal, or_empty

_TYPES = ("float32", "float64", "bfloat16", "float16")


def cuda_batch_norm_fuses(x: jax.Array, feature_axis: int, residual: bool = False) -> bool:
    """Whether relu, and a residual before it, can be a part of the call: where channels come last."""
    last = math.prod(x.shape[feature_axis + 1 :]) == 1 and x.dtype != np.float64
    return last and (not residual or x.shape[feature_axis] % 4 == 0)


def cuda_batch_norm_problem(x: jax.Array, feature_axis: int, relu: bool, residual: bool) -> str:
    """Why cuDNN cannot run a call, as far as a GPU here tells; empty where it can, or none is here."""
    fused = relu and cuda_batch_norm_fuses(x, feature_axis, residual)
    try:
        _sized(x, feature_axis, False, fused, fused and residual)
        _sized(x, feature_axis, True, fused and not residual, False)
    except RuntimeError as error:
        return str(error)
    return ""


@lru_cache(4096)
def _workspace(
    is_backward: bool, dtype: str, outer: int, C: int, inner: int, relu: bool, residual: bool
) -> jax.ShapeDtypeStruct:
    device = gpu_ordinal()
    if device is None:
        # Without a GPU that says how much, a guess that is larger: cuDNN was seen to ask for less than 10 bytes a row
        # and 100 a channel, besides one bit an element for the residual.
        size = (8 << 20) + 32 * outer + 1024 * C + (outer * C * inner // 4 if residual else 0)
    else:
        size = cuda.batch_norm_workspace(device, is_backward, _TYPES.index(dtype), outer, C, inner, relu, residual)
    return jax.ShapeDtypeStruct((size,), np.uint8)


def _sized(x: jax.Array, feature_axis: int, is_backward: bool, relu: bool, residual: bool) -> jax.ShapeDtypeStruct:
    outer, C, inner = math.prod(x.shape[:feature_axis]), x.shape[feature_axis], math.prod(x.shape[feature_axis + 1 :])
    return _workspace(is_backward, x.dtype.name, outer, C, inner, relu, residual)


def _attributes(feature_axis: int, epsilon: float, relu: bool) -> dict[str, Any]:
    return {"feature_axis": np.int64(feature_axis), "epsilon": np.float64(epsilon), "relu": np.bool_(relu)}


def cuda_batch_norm_forward(
    x: jax.Array,
    scale: jax.Array,
    bias: jax.Array,
    residual: jax.Array | None,
    *,
    feature_axis: int,
    epsilon: float,
    relu: bool,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """`(y, mean, rstd, unbiased_var)`, the last three [C]; relu and residual only as cuda_batch_norm_fuses says."""
    channels = _channels(x, feature_axis)
    running = jax.ShapeDtypeStruct((2, *channels.shape), channels.dtype)
    workspace = _sized(x, feature_axis, False, relu, residual is not None)
    like_x = jax.ShapeDtypeStruct(x.shape, x.dtype)
    call = jax.ffi.ffi_call("jaxgrad_batch_norm_cudnn_forward", (like_x, channels, channels, running, workspace))
    y, mean, rstd, statistics, _ = call(
        x, scale, bias, or_empty(residual, x.dtype), **_attributes(feature_axis, epsilon, relu)
    )
    return y, mean, rstd, statistics[1]


def cuda_batch_norm_backward(
    x: jax.Array,
    dy: jax.Array,
    scale: jax.Array,
    bias: jax.Array | None,
    mean: jax.Array,
    rstd: jax.Array,
    *,
    feature_axis: int,
    epsilon: float,
    relu: bool,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`(dx, dscale, dbias)`; relu, which reads the bias, only as cuda_batch_norm_fuses says."""
    channels = _channels(x, feature_axis)
    workspace = _sized(x, feature_axis, True, relu, False)
    like_x = jax.ShapeDtypeStruct(x.shape, x.dtype)
    call = jax.ffi.ffi_call("jaxgrad_batch_norm_cudnn_backward", (like_x, channels, channels, workspace))
    dx, dscale, dbias, _ = call(
        x, dy, scale, or_empty(bias, channels.dtype), mean, rstd, **_attributes(feature_axis, epsilon, relu)
    )
    return dx, dscale, dbias
