"""The calls of ffi/cpu/gru_ffi.cc."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import numpy as np

from jaxgrad._ffi.registration import cpu, or_empty


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
    workspace = cpu.gru_forward_workspace(*sizes, linear_before_reset, x.dtype.itemsize)
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
        or_empty(b, x.dtype),
        or_empty(sequence_lens, np.int32),
        or_empty(initial_h, x.dtype),
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
    workspace = cpu.gru_backward_workspace(*sizes, linear_before_reset, x.dtype.itemsize)
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
        or_empty(sequence_lens, np.int32),
        or_empty(initial_h, x.dtype),
        y,
        gates,
        or_empty(dy, x.dtype),
        or_empty(dy_h, x.dtype),
        **_attributes(direction, linear_before_reset, clip),
    )
    return tuple(gradients)
