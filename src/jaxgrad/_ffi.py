"""The only place that calls `jax.ffi`: registers the compiled handlers and spells out each call's attributes.

An absent operand is passed, and an unwanted result asked for, as an array without elements.
"""

from __future__ import annotations

import importlib
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

_cpu: Any
try:
    _cpu = importlib.import_module("jaxgrad._cpu")
except ImportError as error:
    _cpu, _cpu_error = None, f"the compiled module cannot be loaded ({error})"
else:
    _cpu_error = ""
    for _name, _capsule in _cpu.registrations().items():
        jax.ffi.register_ffi_target(_name, _capsule, platform="cpu")


def cpu_problem() -> str:
    """Why the CPU kernels cannot be used; empty when they can."""
    return _cpu_error


def cpu_targets() -> tuple[str, ...]:
    """The names of the registered CPU handlers."""
    return tuple(sorted(_cpu.registrations())) if _cpu is not None else ()


def cpu_build() -> dict[str, str]:
    """What the compiled module says of itself: FFI API version, compiler, the instruction set in use."""
    return dict(_cpu.build_info()) if _cpu is not None else {}


class GruSizes(NamedTuple):
    """T time steps, B rows, I inputs, H hidden units, D directions."""

    T: int
    B: int
    I: int  # noqa: E741
    H: int
    D: int


_DIRECTIONS = {"forward": 0, "reverse": 1, "bidirectional": 2}


def _attributes(direction: str, linear_before_reset: bool, clip: float | None) -> dict[str, Any]:
    return {
        "direction": np.int64(_DIRECTIONS[direction]),
        "linear_before_reset": np.bool_(linear_before_reset),
        "clip": np.float64(np.inf if clip is None else clip),  # infinity: no clipping
    }


def _or_empty(array: jax.Array | None, dtype: Any) -> jax.Array:
    return jnp.zeros((0,), dtype) if array is None else array


def gru_forward(
    x: jax.Array,
    w: jax.Array,
    r: jax.Array,
    b: jax.Array | None,
    sequence_lens: jax.Array | None,
    initial_h: jax.Array | None,
    *,
    sizes: GruSizes,
    direction: str,
    linear_before_reset: bool,
    clip: float | None,
    training: bool,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`(y, y_h, gates)`; `gates` has no elements unless `training`."""
    T, B, _, H, D = sizes
    n_gates = 4 if linear_before_reset else 3
    workspace = _cpu.gru_forward_workspace(*sizes, linear_before_reset, x.dtype.itemsize)
    call = jax.ffi.ffi_call(
        "jaxgrad_gru_forward",
        (
            jax.ShapeDtypeStruct((T, D, B, H), x.dtype),
            jax.ShapeDtypeStruct((D, B, H), x.dtype),
            jax.ShapeDtypeStruct((T, D, B, n_gates * H) if training else (0,), x.dtype),
            jax.ShapeDtypeStruct((workspace,), np.uint8),
        ),
    )
    y, y_h, gates, _ = call(
        x,
        w,
        r,
        _or_empty(b, x.dtype),
        _or_empty(sequence_lens, np.int32),
        _or_empty(initial_h, x.dtype),
        **_attributes(direction, linear_before_reset, clip),
    )
    return y, y_h, gates


def gru_backward(
    x: jax.Array,
    w: jax.Array,
    r: jax.Array,
    sequence_lens: jax.Array | None,
    initial_h: jax.Array | None,
    y: jax.Array,
    gates: jax.Array,
    dy: jax.Array | None,
    dy_h: jax.Array | None,
    *,
    sizes: GruSizes,
    direction: str,
    linear_before_reset: bool,
    clip: float | None,
    wanted: tuple[bool, ...],
) -> tuple[jax.Array, ...]:
    """`(dx, dw, dr, db, dh0)`; a gradient that is not `wanted` has no elements."""
    _, B, _, H, D = sizes
    shapes = (x.shape, w.shape, r.shape, (D, 6 * H), (D, B, H))
    workspace = _cpu.gru_backward_workspace(*sizes, linear_before_reset, x.dtype.itemsize)
    call = jax.ffi.ffi_call(
        "jaxgrad_gru_backward",
        (
            *(
                jax.ShapeDtypeStruct(shape if want else (0,), x.dtype)
                for shape, want in zip(shapes, wanted, strict=True)
            ),
            jax.ShapeDtypeStruct((workspace,), np.uint8),
        ),
    )
    *gradients, _ = call(
        x,
        w,
        r,
        _or_empty(sequence_lens, np.int32),
        _or_empty(initial_h, x.dtype),
        y,
        gates,
        _or_empty(dy, x.dtype),
        _or_empty(dy_h, x.dtype),
        **_attributes(direction, linear_before_reset, clip),
    )
    return tuple(gradients)


def _channels(x: jax.Array, feature_axis: int) -> jax.ShapeDtypeStruct:
    """An array of one element for each channel, of the type of the arithmetic."""
    return jax.ShapeDtypeStruct((x.shape[feature_axis],), np.float64 if x.dtype == np.float64 else np.float32)


def _batch_norm_workspace(x: jax.Array, feature_axis: int) -> jax.ShapeDtypeStruct:
    outer, C, inner = math.prod(x.shape[:feature_axis]), x.shape[feature_axis], math.prod(x.shape[feature_axis + 1 :])
    return jax.ShapeDtypeStruct((_cpu.batch_norm_workspace(outer, C, inner, x.dtype.itemsize),), np.uint8)


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
    channels, like_x = (_or_empty(mean_low, mean.dtype), rstd), _or_empty(residual, x.dtype)
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
        _or_empty(bias, channels.dtype),
        mean,
        _or_empty(mean_low, channels.dtype),
        rstd,
        _or_empty(y, x.dtype),
        dy,
        _or_empty(dmean, channels.dtype),
        _or_empty(dvar, channels.dtype),
        feature_axis=np.int64(feature_axis),
        frozen=np.bool_(frozen),
        relu=np.bool_(relu),
    )
    return tuple(gradients)
