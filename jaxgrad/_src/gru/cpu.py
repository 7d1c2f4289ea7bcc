"""The CPU backend of the GRU: jaxgrad's C++ kernels in ffi/cpu/gru."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jaxgrad._src.gru.backend import Gradients, GruBackend
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
        results = (
            jax.ShapeDtypeStruct((G, T, D, B, H), x.dtype),
            jax.ShapeDtypeStruct((G, D, B, H), x.dtype),
            jax.ShapeDtypeStruct((G, T, D, B, params.num_gates * H) if save_gates else (G, 0), x.dtype),
        )
        y, y_h, gates = ffi_call(
            "jaxgrad_cpu_gru_forward",
            results,
            (
                x,
                w,
                r,
                empty_if_none(b, x.dtype),
                empty_if_none(sequence_lens, np.int32),
                empty_if_none(initial_h, x.dtype),
                empty_if_none(reset, np.bool_),
                empty_if_none(reset_h, x.dtype),
            ),
            _workspace(cpu.module.gru_forward_workspace, params, x, r),
            named={name: without_groups(a) for name, a in {"x": x, "w": w, "r": r, "y": results[0]}.items()},
            **_attributes(params),
        )
        return y, y_h, gates

    def backward(self, params, x, w, r, sequence_lens, initial_h, reset, reset_h, y, gates, dy, dy_h, *, needs_grad):
        (G, _, B, I), (_, D, _, H) = x.shape, r.shape  # noqa: E741
        state = (G, D, B, H)
        shapes = (x.shape, (G, D, 3 * H, I), (G, D, 3 * H, H), (G, D, 6 * H), state, state)
        found = ffi_call(
            "jaxgrad_cpu_gru_backward",
            [
                jax.ShapeDtypeStruct(shape if needed else (0,), x.dtype)
                for shape, needed in zip(shapes, needs_grad, strict=True)
            ],
            (
                x,
                w,
                r,
                empty_if_none(sequence_lens, np.int32),
                empty_if_none(initial_h, x.dtype),
                empty_if_none(reset, np.bool_),
                empty_if_none(reset_h, x.dtype),
                y,
                gates,
                empty_if_none(dy, x.dtype),
                empty_if_none(dy_h, x.dtype),
            ),
            _workspace(cpu.module.gru_backward_workspace, params, x, r),
            named={name: without_groups(a) for name, a in {"x": x, "w": w, "r": r, "y": y}.items()},
            **_attributes(params),
        )
        return Gradients(*(g if needed else None for g, needed in zip(found, needs_grad, strict=True)))


def _workspace(size: Callable[..., int], params: GruParams, x: jax.Array, r: jax.Array) -> int:
    (G, T, B, I), (_, D, _, H) = x.shape, r.shape  # noqa: E741
    return size(G, T, B, I, H, D, params.linear_before_reset, x.dtype.itemsize)


def _attributes(params: GruParams) -> dict[str, Any]:
    return {
        "direction": _DIRECTIONS[params.direction],
        "linear_before_reset": params.linear_before_reset,
        "clip": np.inf if params.clip is None else params.clip,  # infinity: no bound
    }
