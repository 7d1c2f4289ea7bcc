"""The CUDA backend of the GRU: jaxgrad's persistent kernels in ffi/cuda/gru.

A kernel computes the recurrence of all steps; the input product before it and the products of the weight gradients
after it run on XLA. NVRTC, which comes with JAX's CUDA packages, compiles a kernel while a call that needs it is lowered.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxgrad._src.core.jax_internals import cleared_lru_cache
from jaxgrad._src.core.op import Rejection
from jaxgrad._src.gru import xla
from jaxgrad._src.gru.backend import Gradients, GruBackend
from jaxgrad._src.gru.params import GruParams, GruProblem
from jaxgrad._src.native import cuda
from jaxgrad._src.native.ffi import empty_if_none, ffi_call

_REVERSED = {"forward": 0, "reverse": 1, "bidirectional": 2}  # bit d: direction d runs from the last step


class CudaBackend(GruBackend):
    implementation = "cuda"
    platform = "cuda"
    title = "CUDA kernels of jaxgrad"
    description = "jaxgrad's own kernel"

    def unavailable(self) -> str:
        return cuda.unavailable_kernels()

    def supports(self, pass_name: str, call: GruProblem) -> Rejection | None:
        if min(call.T, call.B) == 0:
            return Rejection("there are no steps or no rows")
        return None

    def find_plan(self, pass_name: str, call: GruProblem) -> Rejection | None:
        try:
            reason = _load(pass_name, call, allows_tf32())
        except RuntimeError as error:
            if jax.process_count() > 1:
                raise
            reason = str(error)
        return Rejection(reason) if reason else None

    def forward(self, params, x, w, r, b, sequence_lens, initial_h, reset, reset_h, *, save_gates):
        (T, B, I), (D, _, H) = x.shape, r.shape  # noqa: E741
        padded = cuda.module.gru_padded_hidden(H)
        weights = jnp.pad(w.reshape(D, 3, H, I), ((0, 0), (0, 0), (0, padded - H), (0, 0)))
        inputs = lax.dot_general(x, weights, (((2,), (3,)), ((), ())), preferred_element_type=jnp.float32)
        if b is not None:
            bias = _bias(params, b.reshape(D, 2, 3, H).astype(jnp.float32))
            inputs += jnp.pad(bias, ((0, 0), (0, 0), (0, padded - H)))
        recurrent_bias = b.reshape(D, 6, H)[:, 5] if b is not None and params.linear_before_reset else None
        results = (
            jax.ShapeDtypeStruct((1, T, D, B, H), x.dtype),
            jax.ShapeDtypeStruct((D, B, H), x.dtype),
            jax.ShapeDtypeStruct((1, T, D, B, params.num_gates * H) if save_gates else (0,), x.dtype),
        )
        y, y_h, gates = ffi_call(
            "jaxgrad_cuda_gru_forward",
            results,
            (
                inputs[None],
                r,
                empty_if_none(recurrent_bias, x.dtype),
                *_of_rows(sequence_lens, initial_h, reset, reset_h, x.dtype),
            ),
            0,
            named={"x": x, "w": w, "r": r, "y": results[0]},
            **_attributes(params),
        )
        return y[0], y_h, gates[0] if save_gates else gates

    def backward(
        self, params, x, w, r, sequence_lens, initial_h, reset, reset_h, y, gates, dy, dy_h, *, needs_grad
    ):
        T, D, B, H = y.shape
        state = jax.ShapeDtypeStruct((D, B, H), jnp.float32)
        none = jax.ShapeDtypeStruct((0,), jnp.float32)
        dgates, dh0, dreset_h = ffi_call(
            "jaxgrad_cuda_gru_backward",
            (
                jax.ShapeDtypeStruct((1, T, B, D, 3, H), x.dtype),
                state if needs_grad[4] else none,
                state if needs_grad[5] else none,
            ),
            (
                r,
                *_of_rows(sequence_lens, initial_h, reset, reset_h, x.dtype),
                y[None],
                gates[None],
                empty_if_none(None if dy is None else dy[None], x.dtype),
                empty_if_none(dy_h, x.dtype),
            ),
            0,
            named={"x": x, "w": w, "r": r, "y": y},
            **_attributes(params),
        )
        dgates = dgates[0].reshape(T, B, D, 3 * H)
        products = xla.products_after_the_scan(
            params, dgates, gates, x, w, r, sequence_lens, initial_h, reset, reset_h, y, needs_grad
        )
        return Gradients(
            *products,
            dh0.astype(x.dtype) if needs_grad[4] else None,
            dreset_h.astype(x.dtype) if needs_grad[5] else None,
        )


def allows_tf32() -> bool:
    """Whether JAX's precision in force lets float32 products round their operands to TF32."""
    return jax.config.jax_default_matmul_precision not in ("highest", "float32", "high", "bfloat16_3x")


def _bias(params: GruParams, b: jax.Array) -> jax.Array:
    """The biases [D, 3, H] that no reset gate multiplies, of b [D, 2, 3, H]."""
    if not params.linear_before_reset:
        return b.sum(1)
    return b[:, 0].at[:, :2].add(b[:, 1, :2])


def _of_rows(
    sequence_lens: jax.Array | None,
    initial_h: jax.Array | None,
    reset: jax.Array | None,
    reset_h: jax.Array | None,
    dtype: Any,
) -> tuple[jax.Array, ...]:
    return (
        empty_if_none(None if sequence_lens is None else sequence_lens[None], np.int32),
        empty_if_none(initial_h, dtype),
        empty_if_none(None if reset is None else reset[None], np.bool_),
        empty_if_none(reset_h, dtype),
    )


def _attributes(params: GruParams) -> dict[str, Any]:
    return {
        "reversed": _REVERSED[params.direction],
        "linear_before_reset": params.linear_before_reset,
        "clip": np.inf if params.clip is None else params.clip,  # infinity: no bound
        "allow_tf32": allows_tf32(),
    }


@cleared_lru_cache(4096)
def _load(pass_name: str, call: GruProblem, allow_tf32: bool) -> str:
    """Compiles the kernel of a pass for the first GPU that JAX uses. Returns why that is impossible; empty if it is
    loaded."""
    device = cuda.gpu_ordinal()
    if device is None:
        return "jaxgrad's own kernel is compiled for the GPU of the machine that lowers the program, which has none"
    if reason := cuda.nvrtc_unavailable():
        return reason
    arguments = cuda.float_type(call.dtype), allow_tf32, call.linear_before_reset, call.D, call.B, call.H
    return str(cuda.module.load_gru_kernel(device, pass_name == "backward", *arguments))
