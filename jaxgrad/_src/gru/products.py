"""The matrix products outside of the recurrence of the GRU, on XLA, for the scan on XLA and for the CUDA kernels."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from jaxgrad._src.gru.formulas import (
    compute_dtype,
    dot,
    keep_valid,
    replace_reset,
    restore_gate,
    scans_in_reverse,
    sigmoid_derivative,
    state_of,
    valid_resets,
    valid_steps,
)
from jaxgrad._src.gru.params import GruParams


def states_before(
    params: GruParams,
    y: jax.Array,
    sequence_lens: jax.Array | None,
    initial_h: jax.Array | None,
    reset: jax.Array | None,
    reset_h: jax.Array | None,
) -> list[jax.Array]:
    """Returns for each direction the states that the steps start with, after resets: [T, B, H]."""
    T, _, B, H = y.shape
    valid = valid_steps(sequence_lens, T)
    reset = valid_resets(reset, valid)
    found = []
    for d, reverse in enumerate(scans_in_reverse(params.direction)):
        previous = _previous_states(y[:, d], state_of(initial_h, d, (B, H), y.dtype), valid, reverse)
        found.append(replace_reset(reset, state_of(reset_h, d, (B, H), y.dtype)[None], previous))
    return found


def _previous_states(states: jax.Array, h0: jax.Array, valid: jax.Array | None, reverse: bool) -> jax.Array:
    """Returns [T, B, H]: the state before each step."""
    if states.shape[0] == 0:
        return states
    # XLA concatenates on a GPU with half of the memory's bandwidth.
    moves = (-1, 1, 0) if reverse else (1, -1, 0)
    neighbours = lax.pad(states, jnp.zeros((), states.dtype), (moves, (0, 0, 0), (0, 0, 0)))
    index = lax.broadcasted_iota(jnp.int32, states.shape, 0)
    previous = jnp.where(index == (states.shape[0] - 1 if reverse else 0), h0[None], neighbours)
    if not reverse or valid is None:
        return previous
    # The first step of a row is at the row's last index, its state before is h0, and the next index is padding.
    follows = jnp.concatenate([valid[1:], jnp.zeros_like(valid[:1])])
    return jnp.where(follows, previous, h0[None])


def products_after_the_scan(
    params: GruParams,
    dgates: Sequence[jax.Array],
    recurrent_dgates: Sequence[jax.Array] | None,
    gates: jax.Array,
    previous: Sequence[jax.Array],
    x: jax.Array,
    w: jax.Array,
    sequence_lens: jax.Array | None,
    needs_grad: tuple[bool, ...],
    joins_products: bool = False,
) -> tuple[jax.Array | None, jax.Array | None, jax.Array | None, jax.Array | None]:
    """Returns the gradients of x, w, r and b that are needed: matrix products over all steps.

    Args:
      params: the static arguments.
      dgates: for each direction, the gradients of the pre-activations of z, r and n [T, B, 3H].
      recurrent_dgates: with linear_before_reset, the same with the gradient of h Rn' + Rbn for that of n; None if they
        are not computed yet.
      gates: the saved gates, as `backend.py` describes them.
      previous: for each direction, the states before the steps [T, B, H].
      x, w, sequence_lens: the operands of the op.
      needs_grad: which gradients are needed, of all that have one.
      joins_products: whether, without linear_before_reset, one product of dgates with both operands [3H, 2H] computes
        dr, half of it unused, in place of two products.
    """
    valid = valid_steps(sequence_lens, x.shape[0])
    dtype = compute_dtype(x)
    dx = None
    if needs_grad[0]:
        of_directions = (keep_valid(valid, dot(params, dgate, w[d], dtype)) for d, dgate in enumerate(dgates))
        dx = functools.reduce(jnp.add, of_directions).astype(x.dtype)
    recurrent: Sequence[jax.Array | None] = recurrent_dgates or [None] * len(dgates)
    of_weights = [
        _weight_gradients(params, dgate, dgate_r, gates[:, d], states, x, valid, needs_grad, joins_products)
        for d, (dgate, dgate_r, states) in enumerate(zip(dgates, recurrent, previous, strict=True))
    ]

    def stacked(index: int) -> jax.Array | None:
        parts = [part for gradients in of_weights if (part := gradients[index]) is not None]
        return jnp.stack(parts).astype(x.dtype) if parts else None

    return dx, stacked(0), stacked(1), stacked(2)


def _weight_gradients(
    params: GruParams,
    dgates: jax.Array,
    recurrent_dgates: jax.Array | None,
    gates: jax.Array,
    previous: jax.Array,
    x: jax.Array,
    valid: jax.Array | None,
    needs_grad: tuple[bool, ...],
    joins_products: bool,
) -> tuple[jax.Array | None, jax.Array | None, jax.Array | None]:
    """Returns dw [3H, I], dr [3H, H] and db [6H] of one direction, by products over all steps."""
    linear_before_reset, clip = params.linear_before_reset, params.clip
    needs_dw, needs_dr, needs_db = needs_grad[1:4]
    dtype, H = compute_dtype(x), previous.shape[2]

    def product(dgate: jax.Array, operand: jax.Array) -> jax.Array:
        operand = keep_valid(valid, operand)  # padding may hold NaN, whose product with a zero of dgate is NaN
        dims = (((0, 1), (0, 1)), ((), ()))
        return lax.dot_general(dgate.astype(x.dtype), operand.astype(x.dtype), dims, params.precision, dtype)

    def sum_of_steps(dgate: jax.Array) -> jax.Array:
        # XLA on a GPU would fuse the sum into the concatenation, where it took up to a fifth of the backward pass.
        return lax.optimization_barrier(dgate.sum((0, 1), dtype))

    def bias_gradients(dn_recurrent: jax.Array) -> jax.Array:
        db = sum_of_steps(dgates)  # also of the recurrent biases, except that of n with linear_before_reset
        own = [db[: 2 * H], sum_of_steps(dn_recurrent)] if linear_before_reset else [db]
        return jnp.concatenate([db, *own])

    dw = product(dgates, x) if needs_dw else None
    if recurrent_dgates is not None:
        dr = product(recurrent_dgates, previous) if needs_dr else None
        return dw, dr, bias_gradients(recurrent_dgates[..., 2 * H :]) if needs_db else None
    dzr, dn = dgates[..., : 2 * H], dgates[..., 2 * H :].astype(dtype)
    gate = restore_gate(gates[..., H : 2 * H].astype(dtype), clip, jax.nn.sigmoid, sigmoid_derivative)[0]
    if linear_before_reset:
        dn_recurrent, state_n = keep_valid(valid, dn * gate), previous
    else:
        dn_recurrent, state_n = dn, gate * previous.astype(dtype)
    if not needs_dr:
        dr = None
    elif joins_products and not linear_before_reset:
        # This product reads all of dgates; for two products, XLA copies slices of it. `where` joins the operands: XLA
        # concatenates on a GPU with half of the memory's bandwidth.
        operand = lax.broadcasted_iota(jnp.int32, (1, 1, 2, 1), 2)
        states = jnp.where(operand == 0, previous.astype(dtype)[:, :, None], state_n[:, :, None])
        of_all = product(dgates, states.reshape(*states.shape[:2], 2 * H))
        dr = jnp.concatenate([of_all[: 2 * H, :H], of_all[2 * H :, H:]])
    else:
        dr = jnp.concatenate([product(dzr, previous), product(dn_recurrent, state_n)])
    return dw, dr, bias_gradients(dn_recurrent) if needs_db else None
