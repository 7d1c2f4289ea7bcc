"""The CUDA backend of the GRU: jaxgrad's persistent kernels in ffi/cuda/gru.

A kernel computes the recurrence of all steps; the input product before it and the products of the weight gradients
after it run on XLA. NVRTC, which comes with JAX's CUDA packages, compiles a kernel while a call that needs it is
lowered.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxgrad._src.choice.op import Rejection
from jaxgrad._src.core.jax_internals import cleared_lru_cache
from jaxgrad._src.core.precision import allows_tf32, default_precision
from jaxgrad._src.gru import xla
from jaxgrad._src.gru.backend import PASSES, Gradients, GruBackend
from jaxgrad._src.gru.params import GruParams, GruProblem
from jaxgrad._src.gru.products import products_after_the_scan, states_before
from jaxgrad._src.native import cuda
from jaxgrad._src.native.ffi import empty_if_none, ffi_call, without_groups
from jaxgrad._src.run.batching import fold, unfold
from jaxgrad._src.run.cuda_kernels import NO_GPU, CudaKernelBackend
from jaxgrad._src.run.plan_directory import plan_directory

# With linear_before_reset, the kernel writes the gradients that the recurrent weights need from this many hidden units
# of all rows on. Below, that takes longer than the multiplication on XLA.
_MANY_UNITS = 1 << 13
# Without linear_before_reset, where the state of one row has at most this many bytes, one product on tensor cores of
# the gradients of all gates with both of their operands takes at most as long as two products, for which XLA copies
# slices of the gradients: memory bounds either form. With twice the bytes, two products are faster. Compared on an H200
# alone.
_JOINED_BYTES = 512
_REVERSED = {"forward": 0b00, "reverse": 0b01, "bidirectional": 0b10}  # bit d: direction d runs from the last step


class CudaBackend(CudaKernelBackend, GruBackend):
    def find_plan(self, pass_name: str, call: GruProblem) -> Rejection | None:
        """Both passes run on the kernels, or neither does.

        Raises RuntimeError for a failure of CUDA in a multi-process program: other processes, in which CUDA works,
        would lower another program.
        """
        try:
            if reason := _kernel_rejection(call):
                return Rejection(reason)
            missing = cuda.nvrtc_unavailable()
            return _missing(missing) if missing else _load(call)
        except RuntimeError as error:
            if jax.process_count() > 1:
                raise
            return _missing(str(error))

    def supports_resized(self, pass_name: str, call: GruProblem) -> bool:
        # Other sizes may need another kernel, which is compiled here and not when the program runs first.
        return not min(call.T, call.B) or self.find_plan(pass_name, call) is None

    def typical_rejection(self, op_name: str, pass_name: str) -> Rejection | None:
        typical = GruProblem(100, 32, 128, 128, 1, jnp.dtype("float32"), False, None, default_precision())
        try:
            reason = "" if cuda.module_unavailable() else _kernel_rejection(typical)
        except RuntimeError as error:
            reason = str(error)
        return Rejection(reason) if reason else None

    def forward(self, params, x, w, r, b, sequence_lens, initial_h, reset, reset_h, *, save_gates):
        if 0 in x.shape:
            on_xla = jax.vmap(partial(xla.forward, params, save_gates=save_gates))
            return on_xla(x, w, r, b, sequence_lens, initial_h, reset, reset_h)
        (G, T, B, I), (_, D, _, H) = x.shape, r.shape  # noqa: E741
        dims = (((3,), (2,)), ((0,), (0,)))
        inputs = lax.dot_general(x, w.reshape(G, D * 3 * H, I), dims, params.precision, jnp.float32)
        results = (
            jax.ShapeDtypeStruct((G, T, D, B, H), x.dtype),
            jax.ShapeDtypeStruct((G, D, B, H), x.dtype),
            jax.ShapeDtypeStruct((G, T, D, B, params.num_gates * H) if save_gates else (G, 0), x.dtype),
        )
        y, y_h, gates = ffi_call(
            "jaxgrad_cuda_gru_forward",
            results,
            (
                inputs.reshape(G, T, B, D, 3, H),
                r,
                empty_if_none(b, x.dtype),
                empty_if_none(sequence_lens, np.int32),
                empty_if_none(initial_h, x.dtype),
                empty_if_none(reset, np.bool_),
                empty_if_none(reset_h, x.dtype),
            ),
            _workspace("forward", params.problem(x, r)),
            named={name: without_groups(a) for name, a in {"x": x, "w": w, "r": r, "y": results[0]}.items()},
            **_attributes(params),
        )
        return y, y_h, gates

    def backward(self, params, x, w, r, sequence_lens, initial_h, reset, reset_h, y, gates, dy, dy_h, *, needs_grad):
        named = {name: without_groups(a) for name, a in {"x": x, "w": w, "r": r, "y": y}.items()}
        shares_weights = r.shape[0] < x.shape[0]
        if shares_weights:
            w, r = w[0], r[0]
        weights_axis = None if shares_weights else 0
        if 0 in x.shape:
            on_xla = partial(xla.backward, params, needs_grad=needs_grad)
            operands = x, w, r, sequence_lens, initial_h, reset, reset_h, y, gates, dy, dy_h
            return jax.vmap(on_xla, (0, weights_axis, weights_axis, *[0] * 8))(*operands)
        problem = params.problem(x, r)
        examples = x.shape[0] if shares_weights else 1

        def rows(array: Any, axis: int) -> Any:
            """Groups that share the weights become rows of one group: the kernel computes all of them at once."""
            return fold(array, axis)[None] if shares_weights and array is not None else array

        def groups(array: jax.Array, axis: int) -> jax.Array:
            return unfold(array[0], axis, examples) if shares_weights else array

        G, T, D, B, H = problem.groups, problem.T, problem.D, problem.B, problem.H
        state, none = (jax.ShapeDtypeStruct(shape, np.float32) for shape in ((G, D, B, H), (0,)))
        of_gates = jax.ShapeDtypeStruct((G, T, B, D, 3, H), x.dtype)
        writes_recurrent = params.linear_before_reset and G * D * B * H >= _MANY_UNITS
        needs_recurrent = writes_recurrent and (needs_grad[2] or needs_grad[3])
        dgates, recurrent_dgates, dh0, dreset_h = ffi_call(
            "jaxgrad_cuda_gru_backward",
            (
                of_gates,
                of_gates if needs_recurrent else jax.ShapeDtypeStruct((0,), x.dtype),
                state if needs_grad[4] else none,
                state if needs_grad[5] else none,
            ),
            (
                r[None] if shares_weights else r,
                empty_if_none(rows(sequence_lens, 0), np.int32),
                empty_if_none(rows(initial_h, 1), x.dtype),
                empty_if_none(rows(reset, 1), np.bool_),
                empty_if_none(rows(reset_h, 1), x.dtype),
                rows(y, 2),
                rows(gates, 2),
                empty_if_none(rows(dy, 2), x.dtype),
                empty_if_none(rows(dy_h, 1), x.dtype),
            ),
            _workspace("backward", problem),
            named=named,
            **_attributes(params),
        )

        def products(dgates, recurrent_dgates, x, w, sequence_lens, initial_h, reset, reset_h, y, gates):
            def of_directions(array):
                return [array[:, :, d].reshape(*x.shape[:2], 3 * H) for d in range(D)]

            recurrent = None if recurrent_dgates is None else of_directions(recurrent_dgates)
            previous = states_before(params, y, sequence_lens, initial_h, reset, reset_h)
            arrays = of_directions(dgates), recurrent, gates, previous, x, w, sequence_lens
            on_tensor_cores = x.dtype != np.float32 or allows_tf32(params.precision)
            joins_products = on_tensor_cores and H * x.dtype.itemsize <= _JOINED_BYTES
            return products_after_the_scan(params, *arrays, needs_grad, joins_products)

        of_both = groups(dgates, 1), groups(recurrent_dgates, 1) if needs_recurrent else None
        of_groups = *of_both, x, w, sequence_lens, initial_h, reset, reset_h, y, gates
        dx, dw, dr, db = jax.vmap(products, (0, 0, 0, weights_axis, *[0] * 6))(*of_groups)
        return Gradients(
            dx,
            dw,
            dr,
            db,
            groups(dh0, 1).astype(x.dtype) if needs_grad[4] else None,
            groups(dreset_h, 1).astype(x.dtype) if needs_grad[5] else None,
        )


def _attributes(params: GruParams) -> dict[str, Any]:
    return {
        "reversed": _REVERSED[params.direction],
        "linear_before_reset": params.linear_before_reset,
        "clip": np.inf if params.clip is None else params.clip,  # infinity: no bound
        "allow_tf32": allows_tf32(params.precision),
    }


def _missing(reason: str) -> Rejection:
    return Rejection(f"jaxgrad's own CUDA kernels are missing: {reason}", missing=reason)


@cleared_lru_cache(4096)
def _kernel_rejection(call: GruProblem) -> str:
    """Returns why the kernels cannot compute a call on the first GPU that JAX uses; empty if they can."""
    if cuda.gpu_ordinal() is None:
        return NO_GPU
    return str(cuda.module.gru_rejection(*_key(call)))


@cleared_lru_cache(4096)
@plan_directory()
def _load(call: GruProblem) -> Rejection | None:
    """Compiles and loads the kernels of both passes. Returns why that is impossible; None if they are loaded."""
    for pass_name in PASSES:
        with np.errstate(over="ignore"):
            has_clip = call.clip is not None and bool(np.isfinite(np.float32(call.clip)))  # as the handler reads it
        features = {
            "has_lengths": call.has_lengths,
            "has_resets": call.has_resets,
            "has_reset_h": call.has_reset_h,
            "has_clip": has_clip,
        }
        try:
            if reason := cuda.module.load_gru_kernel(pass_name == "backward", *_key(call), **features):
                return _missing(reason)
        except ValueError as error:  # such as too few blocks at once, which is known only of a compiled kernel
            return Rejection(str(error))
    return None


@cleared_lru_cache(4096)
def _workspace(pass_name: str, call: GruProblem) -> int:
    """The bytes in which the blocks of a kernel exchange states.

    They depend on the call and the kind of the GPU alone, so that every host lowers the same program.
    """
    return int(cuda.module.gru_variant(pass_name == "backward", *_key(call))["workspace_bytes"])


def _key(call: GruProblem) -> tuple[Any, ...]:
    allow_tf32 = allows_tf32(call.precision)
    return (
        cuda.gpu_ordinal(),
        cuda.float_type(call.dtype),
        allow_tf32,
        call.linear_before_reset,
        call.groups * call.D,
        call.B,
        call.H,
    )
