"""The XLA implementation of the GRU: a scan forward, and a hand-written backward pass.

The weight gradients are one matrix product over all steps, after the scan. `backend.py` describes the residuals. All
arithmetic is float32, or float64 for float64 arrays.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxgrad._src.gru.backend import Gradients
from jaxgrad._src.gru.formulas import (
    clip_gate,
    compute_dtype,
    dot,
    keep_valid,
    mark_clipped,
    replace_reset,
    restore_gate,
    scans_in_reverse,
    sigmoid_derivative,
    state_of,
    tanh_derivative,
    valid_resets,
    valid_steps,
)
from jaxgrad._src.gru.params import GruParams
from jaxgrad._src.gru.products import products_after_the_scan, states_before
from jaxgrad._src.run.mesh_axes import pvary_to_match

_UNROLL = 4  # steps of the scan in one loop body: measured best, or close to it, for H from 128 to 1024


def _unroll(T: int) -> int:
    """The number of steps in one loop body. A symbolic T need not be a multiple of one."""
    return min(_UNROLL, max(T, 1)) if isinstance(T, int) else 1


def forward(
    params: GruParams,
    x: jax.Array,
    w: jax.Array,
    r: jax.Array,
    b: jax.Array | None,
    sequence_lens: jax.Array | None,
    initial_h: jax.Array | None,
    reset: jax.Array | None,
    reset_h: jax.Array | None,
    *,
    save_gates: bool,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns `(y, y_h, gates)`. `gates` has no elements unless `save_gates`."""
    linear_before_reset, clip = params.linear_before_reset, params.clip
    T, B, _ = x.shape
    H = r.shape[2]
    dtype = compute_dtype(x)
    valid = valid_steps(sequence_lens, T)
    reset = valid_resets(reset, valid)
    x = keep_valid(valid, x)  # padding must not reach the derivatives of this function either

    def one_direction(d: int, reverse: bool) -> tuple[jax.Array, jax.Array, jax.Array]:
        wb, rb = jnp.zeros((2, 3 * H), dtype) if b is None else b[d].astype(dtype).reshape(2, 3 * H)
        h0 = state_of(initial_h, d, (B, H), dtype)
        restart = state_of(reset_h, d, (B, H), dtype)
        h0, _ = pvary_to_match(h0, x)  # the carry of a loop must vary over the same mesh axes before and after a step
        # Sliced before the transposes and the loop: XLA copies a slice of transposed weights in every step.
        rt, rt_zr, rt_n = r[d].T, r[d][: 2 * H].T, r[d][2 * H :].T
        # The input product includes every bias that is added outside the product with the reset gate.
        bias = wb.at[: 2 * H].add(rb[: 2 * H]) if linear_before_reset else wb + rb
        inputs = dot(params, x, w[d].T, dtype) + bias[None, None]

        def step(h, t):
            input_t, valid_t, reset_t = t
            h = replace_reset(reset_t, restart, h)
            if linear_before_reset:
                product = dot(params, h, rt, dtype)
                recurrent = product[:, 2 * H :] + rb[None, 2 * H :]
            else:
                product = dot(params, h, rt_zr, dtype)
            zr = input_t[:, : 2 * H] + product[:, : 2 * H]
            z, gate = jnp.split(jax.nn.sigmoid(clip_gate(zr, clip)), 2, axis=1)
            if linear_before_reset:
                candidate = input_t[:, 2 * H :] + gate * recurrent
            else:
                candidate = input_t[:, 2 * H :] + dot(params, gate * h, rt_n, dtype)
            n = jnp.tanh(clip_gate(candidate, clip))
            new_h = (1 - z) * n + z * h
            y = new_h
            if valid_t is not None:
                new_h, y = jnp.where(valid_t, new_h, h), jnp.where(valid_t, new_h, 0)
            if not save_gates:
                return new_h, (y.astype(x.dtype), jnp.zeros((0,), x.dtype))
            gates = [mark_clipped(jnp.concatenate([z, gate], 1), zr, clip), mark_clipped(n, candidate, clip)]
            if linear_before_reset:
                gates.append(recurrent)
            return new_h, (y.astype(x.dtype), jnp.concatenate(gates, 1).astype(x.dtype))

        y_h, (y, gates) = lax.scan(step, h0, (inputs, valid, reset), reverse=reverse, unroll=_unroll(T))
        return y, y_h.astype(x.dtype), gates

    ys, y_hs, gates = zip(
        *(one_direction(d, rev) for d, rev in enumerate(scans_in_reverse(params.direction))), strict=True
    )
    return jnp.stack(ys, 1), jnp.stack(y_hs), jnp.stack(gates, 1) if save_gates else jnp.zeros((0,), x.dtype)


def backward(
    params: GruParams,
    x: jax.Array,
    w: jax.Array,
    r: jax.Array,
    sequence_lens: jax.Array | None,
    initial_h: jax.Array | None,
    reset: jax.Array | None,
    reset_h: jax.Array | None,
    y: jax.Array,
    gates: jax.Array,
    dy: jax.Array | None,
    dy_h: jax.Array | None,
    *,
    needs_grad: tuple[bool, ...],
) -> Gradients:
    """Returns the gradients that are needed of (x, w, r, b, initial_h, reset_h).

    In each step, with dh the gradient of h' = (1 - z) n + z h:

      dn = dh (1 - z) tanh'     dz = dh (h - n) sigmoid'
      linear_before_reset=False: dr = (dn Rn) h sigmoid',  dh += z dh + (dn Rn) r + [dz, dr] [Rz; Rr]
      linear_before_reset=True:  dr = dn (h Rn' + Rbn) sigmoid',  dh += z dh + [dz, dr, r dn] R

    Where a reset replaced h, its gradient is one of reset_h, and that of the state before the reset is zero.
    """
    T, B, _ = x.shape
    H = r.shape[2]
    dtype = compute_dtype(x)
    valid = valid_steps(sequence_lens, T)
    resets = valid_resets(reset, valid)
    previous = states_before(params, y, sequence_lens, initial_h, reset, reset_h)
    dgates, dh0, dreset_h = [], [], []
    for d, reverse in enumerate(scans_in_reverse(params.direction)):
        dh_last, dreset = state_of(dy_h, d, (B, H), dtype), jnp.zeros((B, H), dtype) if needs_grad[5] else None
        dh_last, dreset, _ = pvary_to_match(dh_last, dreset, x)
        steps = gates[:, d], previous[d], valid, resets, None if dy is None else dy[:, d]
        (dh_first, dreset), dgates_of_direction = _backward_scan(params, (dh_last, dreset), steps, r[d], reverse)
        dgates.append(dgates_of_direction)
        dh0.append(dh_first)
        if dreset is not None:
            dreset_h.append(dreset)
    products = products_after_the_scan(params, dgates, None, gates, previous, x, w, sequence_lens, needs_grad)
    return Gradients(
        *products,
        jnp.stack(dh0).astype(x.dtype) if needs_grad[4] else None,
        jnp.stack(dreset_h).astype(x.dtype) if needs_grad[5] else None,
    )


def _backward_scan(
    params: GruParams,
    last: tuple[jax.Array, jax.Array | None],
    steps: tuple[Any, ...],
    r: jax.Array,
    reverse: bool,
) -> tuple[tuple[jax.Array, jax.Array | None], jax.Array]:
    """The recurrence of one direction.

    Args:
      params: the static arguments.
      last: the gradient of the last state [B, H], and zeros for the sum of the gradients of reset_h, or None.
      steps: (gates, states before the steps, valid, reset, dy), all with the steps first.
      r: the recurrent weights [3H, H].
      reverse: whether the forward pass ran from the last step to the first.

    Returns:
      (dh0 [B, H], dreset_h [B, H] or None), and dgates [T, B, 3H], the gradients of the pre-activations of z, r and n.
    """
    linear_before_reset, clip = params.linear_before_reset, params.clip
    T, _, H = steps[1].shape
    dtype = last[0].dtype

    def step(carry, t):
        dh, dreset_h = carry
        gates_t, h, valid_t, reset_t, dy_t = t
        out = dh if dy_t is None else dh + dy_t.astype(dtype)
        gates_t, h = gates_t.astype(dtype), h.astype(dtype)
        zr, zr_derivative = restore_gate(gates_t[:, : 2 * H], clip, jax.nn.sigmoid, sigmoid_derivative)
        n, n_derivative = restore_gate(gates_t[:, 2 * H : 3 * H], clip, jnp.tanh, tanh_derivative)
        z, gate = jnp.split(zr, 2, axis=1)
        dn = out * (1 - z) * n_derivative
        dz = out * (h - n) * zr_derivative[:, :H]
        if linear_before_reset:
            dr = dn * gates_t[:, 3 * H :] * zr_derivative[:, H:]
            dgates = keep_valid(valid_t, jnp.concatenate([dz, dr, dn], 1))
            recurrent = jnp.concatenate([dgates[:, : 2 * H], dgates[:, 2 * H :] * gate], 1)
            new_dh = z * out + dot(params, recurrent, r, dtype)
        else:
            dgated_h = dot(params, dn, r[2 * H :], dtype)
            dr = dgated_h * h * zr_derivative[:, H:]
            dgates = keep_valid(valid_t, jnp.concatenate([dz, dr, dn], 1))
            new_dh = z * out + dgated_h * gate + dot(params, dgates[:, : 2 * H], r[: 2 * H], dtype)
        if valid_t is not None:
            new_dh = jnp.where(valid_t, new_dh, dh)
        if reset_t is not None:
            dreset_h = None if dreset_h is None else dreset_h + jnp.where(reset_t, new_dh, 0)
            new_dh = jnp.where(reset_t, 0, new_dh)
        return (new_dh, dreset_h), dgates

    return lax.scan(step, last, steps, reverse=not reverse, unroll=_unroll(T))
