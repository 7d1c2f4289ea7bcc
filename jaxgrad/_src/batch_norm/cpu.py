"""The calls of ffi/cpu/batch_norm_ffi.cc."""

from __future__ import annotations

import math

import jax
import numpy as np

from jaxgrad._ffi.registration import cpu, or_empty


def _channels(x: jax.Array, feature_axis: int) -> jax.ShapeDtypeStruct:
    """An array of one element for each channel, of the type of the arithmetic."""
    return jax.ShapeDtypeStruct((x.shape[feature_axis],), np.float64 if x.dtype == np.float64 else np.float32)


def _batch_norm_workspace(x: jax.Array, feature_axis: int) -> jax.ShapeDtypeStruct:
    outer, C, inner = math.prod(x.shape[:feature_axis]), x.shape[feature_axis], math.prod(x.shape[feature_axis + 1 :])
    return jax.ShapeDtypeStruct((cpu.batch_norm_workspace(outer, C, inner, x.dtype.itemsize),), np.uint8)


def batch_norm_statistics(
    x: jax.Array, *, feature_axis: int, epsilon: float
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """`(mean, mean_low, var, rstd)`, each [C]."""
    call = jax.ffi.ffi_call(
        "jaxgrad_batch_norm_statistics", (*[_channels(x, feature_axis)] * 4, _batch_norm_workspace(x, feature_axis))
    )
    mean, mean_low, var, rstd, _ = call(x, feature_axis=np.int64(feature_axis), epsilon=np.float64(epsilon))
    return mean, mean_low, var, rstd


def batch_norm_normalise(
    x: jax.Array,
    scale: jax.Array,
    bias: jax.Array,
    mean: jax.Array,
    mean_low: jax.Array | None,
    rstd: jax.Array,
    residual: jax.Array | None,
    *,
    feature_axis: int,
    relu: bool,
) -> jax.Array:
    """y, like x."""
    call = jax.ffi.ffi_call(
        "jaxgrad_batch_norm_normalise",
        (jax.ShapeDtypeStruct(x.shape, x.dtype), _batch_norm_workspace(x, feature_axis)),
    )
    channels, like_x = (or_empty(mean_low, mean.dtype), rstd), or_empty(residual, x.dtype)
    y, _ = call(x, scale, bias, mean, *channels, like_x, feature_axis=np.int64(feature_axis), relu=np.bool_(relu))
    return y


def batch_norm_backward(
    x: jax.Array,
    scale: jax.Array,
    bias: jax.Array | None,
    mean: jax.Array,
    mean_low: jax.Array | None,
    rstd: jax.Array,
    y: jax.Array | None,
    dy: jax.Array,
    dmean: jax.Array | None,
    dvar: jax.Array | None,
    *,
    feature_axis: int,
    frozen: bool,
    relu: bool,
    wanted: tuple[bool, ...],
) -> tuple[jax.Array, ...]:
    """`(dx, dscale, dbias, dresidual)`; a gradient that is not `wanted` has no elements."""
    like_x, channels = jax.ShapeDtypeStruct(x.shape, x.dtype), _channels(x, feature_axis)
    call = jax.ffi.ffi_call(
        "jaxgrad_batch_norm_backward",
        (
            *(
                kind if want else jax.ShapeDtypeStruct((0,), kind.dtype)
                for kind, want in zip((like_x, channels, channels, like_x), wanted, strict=True)
            ),
            _batch_norm_workspace(x, feature_axis),
        ),
    )
    *gradients, _ = call(
        x,
        scale,
        or_empty(bias, channels.dtype),
        mean,
        or_empty(mean_low, channels.dtype),
        rstd,
        or_empty(y, x.dtype),
        dy,
        or_empty(dmean, channels.dtype),
        or_empty(dvar, channels.dtype),
        feature_axis=np.int64(feature_axis),
        frozen=np.bool_(frozen),
        relu=np.bool_(relu),
    )
    return tuple(gradients)
