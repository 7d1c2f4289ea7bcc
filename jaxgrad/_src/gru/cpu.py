"""The CPU backend of the GRU: jaxgrad's C++ kernels in ffi/cpu/gru."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxgrad._src.gru.backend import Gradients, GruBackend
from jaxgrad._src.gru.batch_major import batch_major_y, time_major_y
from jaxgrad._src.gru.params import GruParams
from jaxgrad._src.native import cpu
from jaxgrad._src.native.ffi import empty_if_none, ffi_call, without_groups

_DIRECTIONS = {"forward": 0, "reverse": 1, "bidirectional": 2}


class CpuBackend(GruBackend):
    implementation = "cpu"
    platform = "cpu"
    title = "CPU kernels"
    description = "the CPU kernel supports every dtype and shape of this op"

    def unavailable(self) -> str:
        return cpu.unavailable()

    def forward(self, params, x, w, r, b, sequence_lens, initial_h, reset, reset_h, *, save_gates):
        G, T, B, _ = x.shape
        _, D, _, H = r.shape
        ordered_x = _ordered(params, _swapped, x)
        results = (
            jax.ShapeDtypeStruct((G, B, T, D, H) if params.batch_major else (G, T, D, B, H), x.dtype),
            jax.ShapeDtypeStruct((G, D, B, H), x.dtype),
            jax.ShapeDtypeStruct((G, T, D, B, params.num_gates * H) if save_gates else (G, 0), x.dtype),
        )
        y, y_h, gates = ffi_call(
            "jaxgrad_cpu_gru_forward",
            results,
            (
                ordered_x,
                w,
                r,
                empty_if_none(b, x.dtype),
                empty_if_none(sequence_lens, np.int32),
                empty_if_none(initial_h, x.dtype),
                empty_if_none(reset, np.bool_),
                empty_if_none(reset_h, x.dtype),
            ),
            _workspace(cpu.module.gru_forward_workspace, params, x, r),
            named={name: without_groups(a) for name, a in {"x": ordered_x, "w": w, "r": r, "y": results[0]}.items()},
            **_attributes(params),
        )
        return _ordered(params, time_major_y, y), y_h, gates

    def backward(self, params, x, w, r, sequence_lens, initial_h, reset, reset_h, y, gates, dy, dy_h, *, needs_grad):
        (G, _, B, I), (_, D, _, H) = x.shape, r.shape  # noqa: E741
        state = (G, D, B, H)
        ordered_x, ordered_y = _ordered(params, _swapped, x), _ordered(params, batch_major_y, y)
        ordered_dy = None if dy is None else _ordered(params, batch_major_y, dy)
        shapes = (ordered_x.shape, (G, D, 3 * H, I), (G, D, 3 * H, H), (G, D, 6 * H), state, state)
        found = ffi_call(
            "jaxgrad_cpu_gru_backward",
            [
                jax.ShapeDtypeStruct(shape if needed else (0,), x.dtype)
                for shape, needed in zip(shapes, needs_grad, strict=True)
            ],
            (
                ordered_x,
                w,
                r,
                empty_if_none(sequence_lens, np.int32),
                empty_if_none(initial_h, x.dtype),
                empty_if_none(reset, np.bool_),
                empty_if_none(reset_h, x.dtype),
                ordered_y,
                gates,
                empty_if_none(ordered_dy, x.dtype),
                empty_if_none(dy_h, x.dtype),
            ),
            _workspace(cpu.module.gru_backward_workspace, params, x, r),
            named={name: without_groups(a) for name, a in {"x": ordered_x, "w": w, "r": r, "y": ordered_y}.items()},
            **_attributes(params),
        )
        dx, *others = (g if needed else None for g, needed in zip(found, needs_grad, strict=True))
        return Gradients(dx if dx is None else _ordered(params, _swapped, dx), *others)


def _ordered(params: GruParams, change: Callable[[jax.Array], jax.Array], array: jax.Array) -> jax.Array:
    """The array [G, ...] with `change` applied to each group, if the caller's arrays have the batch first.

    XLA does not remove a pair of transposes if one of them moves the groups along: a single group is not an axis of it.
    """
    if not params.batch_major:
        return array
    if array.shape[0] > 1:
        return jax.vmap(change)(array)
    changed = change(array.reshape(array.shape[1:]))
    return changed.reshape(1, *changed.shape)


def _swapped(x: jax.Array) -> jax.Array:
    return jnp.swapaxes(x, 0, 1)


def _workspace(size: Callable[..., int], params: GruParams, x: jax.Array, r: jax.Array) -> int:
    (G, T, B, I), (_, D, _, H) = x.shape, r.shape  # noqa: E741
    return size(G, T, B, I, H, D, params.linear_before_reset, x.dtype.itemsize)


def _attributes(params: GruParams) -> dict[str, Any]:
    return {
        "direction": _DIRECTIONS[params.direction],
        "linear_before_reset": params.linear_before_reset,
        "batch_major": params.batch_major,
        "clip": np.inf if params.clip is None else params.clip,  # infinity: no bound
    }
