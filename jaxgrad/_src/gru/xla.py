"""The XLA implementation of the GRU: a scan forward, and a hand-written backward pass.

The weight gradients are one matrix product over all steps, after the scan. `backend.py` describes the residuals. All
arithmetic is float32, or float64 for float64 arrays.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxgrad._src.core.mesh_axes import pvary_to_match
from jaxgrad._src.gru.backend import Gradients
from jaxgrad._src.gru.params import GruParams

_CLIPPED = 2.0  # saved in place of a gate whose pre-activation was clipped
_UNROLL = 4  # steps of the scan in one loop body: measured best, or close to it, for H from 128 to 1024


def _unroll(T: int) -> int:
    """The number of steps in one loop body. A symbolic T need not be a multiple of one."""
    return min(_UNROLL, max(T, 1)) if isinstance(T, int) else 1


def _compute_dtype(array: jax.Array) -> jnp.dtype:
    return jnp.dtype(jnp.float32) if array.dtype.itemsize == 2 else array.dtype


def _dot(params: GruParams, a: jax.Array, b: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Returns a[..., k] b[k, n], with operands in the storage dtype and the sum in `dtype`."""
    dims = (((a.ndim - 1,), (0,)), ((), ()))
    return lax.dot_general(a.astype(b.dtype), b, dims, params.precision, dtype)


def _valid(sequence_lens: jax.Array | None, T: int) -> jax.Array | None:
    """Returns [T, B, 1]: whether a step lies within the length of its row. Lengths are clamped to [0, T]."""
    return (
        None
        if sequence_lens is None
        else (jnp.arange(T, dtype=sequence_lens.dtype)[:, None] < sequence_lens[None, :])[..., None]
    )


def _keep(valid: jax.Array | None, array: jax.Array) -> jax.Array:
    """Returns the array with zeros past the length of each row, even where it holds NaN."""
    return array if valid is None else jnp.where(valid, array, 0)


def _valid_resets(reset: jax.Array | None, valid: jax.Array | None) -> jax.Array | None:
    """Returns [T, B, 1]: whether the state before a step is replaced. No state is past the length of a row."""
    if reset is None:
        return None
    return reset[..., None] if valid is None else reset[..., None] & valid


def _state(states: jax.Array | None, d: int, shape: tuple[int, int], dtype: jnp.dtype) -> jax.Array:
    """Returns the states [B, H] of one direction, of `states` [D, B, H] or zeros."""
    return jnp.zeros(shape, dtype) if states is None else states[d].astype(dtype)


def _replace(reset: jax.Array | None, restart: jax.Array, h: jax.Array) -> jax.Array:
    """Returns the states before one step or all steps, replaced by `restart` where `reset` is true."""
    return h if reset is None else jnp.where(reset, restart, h)


def _clip(gate: jax.Array, clip: float | None) -> jax.Array:
    return gate if clip is None else jnp.clip(gate, -clip, clip)


def _mark_clipped(gate: jax.Array, before: jax.Array, clip: float | None) -> jax.Array:
    if clip is None:
        return gate
    return jnp.where(before >= clip, _CLIPPED, jnp.where(before <= -clip, -_CLIPPED, gate))


def _restore_gate(
    gates: jax.Array,
    clip: float | None,
    activation: Callable[[jax.Array], jax.Array],
    derivative: Callable[[jax.Array], jax.Array],
) -> tuple[jax.Array, jax.Array]:
    """Returns a saved gate and the derivative of its activation, which is zero where the gate was clipped."""
    if clip is None:
        return gates, derivative(gates)
    clipped = jnp.abs(gates) > 1.5
    value = jnp.where(clipped, activation(jnp.sign(gates) * clip), gates)
    return value, jnp.where(clipped, 0, derivative(value))


def _sigmoid_derivative(s: jax.Array) -> jax.Array:
    return s * (1 - s)


def _tanh_derivative(t: jax.Array) -> jax.Array:
    return 1 - t * t


def _scans_in_reverse(direction: str) -> tuple[bool, ...]:
    return {"forward": (False,), "reverse": (True,), "bidirectional": (False, True)}[direction]


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
    dtype = _compute_dtype(x)
    valid = _valid(sequence_lens, T)
    reset = _valid_resets(reset, valid)
    x = _keep(valid, x)  # padding must not reach the derivatives of this function either

    def one_direction(d: int, reverse: bool) -> tuple[jax.Array, jax.Array, jax.Array]:
        wb, rb = jnp.zeros((2, 3 * H), dtype) if b is None else b[d].astype(dtype).reshape(2, 3 * H)
        h0 = _state(initial_h, d, (B, H), dtype)
        restart = _state(reset_h, d, (B, H), dtype)
        h0, _ = pvary_to_match(h0, x)  # the carry of a loop must vary over the same mesh axes before and after a step
        rt = r[d].T
        # The input product includes every bias that is added outside the product with the reset gate.
        bias = wb.at[: 2 * H].add(rb[: 2 * H]) if linear_before_reset else wb + rb
        inputs = _dot(params, x, w[d].T, dtype) + bias[None, None]

        def step(h, t):
            input_t, valid_t, reset_t = t
            h = _replace(reset_t, restart, h)
            if linear_before_reset:
                product = _dot(params, h, rt, dtype)
                recurrent = product[:, 2 * H :] + rb[None, 2 * H :]
            else:
                product = _dot(params, h, rt[:, : 2 * H], dtype)
            zr = input_t[:, : 2 * H] + product[:, : 2 * H]
            z, gate = jnp.split(jax.nn.sigmoid(_clip(zr, clip)), 2, axis=1)
            if linear_before_reset:
                candidate = input_t[:, 2 * H :] + gate * recurrent
            else:
                candidate = input_t[:, 2 * H :] + _dot(params, gate * h, rt[:, 2 * H :], dtype)
            n = jnp.tanh(_clip(candidate, clip))
            new_h = (1 - z) * n + z * h
            y = new_h
            if valid_t is not None:
                new_h, y = jnp.where(valid_t, new_h, h), jnp.where(valid_t, new_h, 0)
            if not save_gates:
                return new_h, (y.astype(x.dtype), jnp.zeros((0,), x.dtype))
            gates = [_mark_clipped(jnp.concatenate([z, gate], 1), zr, clip), _mark_clipped(n, candidate, clip)]
            if linear_before_reset:
                gates.append(recurrent)
            return new_h, (y.astype(x.dtype), jnp.concatenate(gates, 1).astype(x.dtype))

        y_h, (y, gates) = lax.scan(step, h0, (inputs, valid, reset), reverse=reverse, unroll=_unroll(T))
        return y, y_h.astype(x.dtype), gates

    ys, y_hs, gates = zip(
        *(one_direction(d, rev) for d, rev in enumerate(_scans_in_reverse(params.direction))), strict=True
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
    dtype = _compute_dtype(x)
    valid = _valid(sequence_lens, T)
    resets = _valid_resets(reset, valid)
    previous = states_before(params, y, sequence_lens, initial_h, reset, reset_h)
    dgates, dh0, dreset_h = [], [], []
    for d, reverse in enumerate(_scans_in_reverse(params.direction)):
        dh_last, dreset = _state(dy_h, d, (B, H), dtype), jnp.zeros((B, H), dtype) if needs_grad[5] else None
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
    valid = _valid(sequence_lens, T)
    reset = _valid_resets(reset, valid)
    found = []
    for d, reverse in enumerate(_scans_in_reverse(params.direction)):
        previous = _previous_states(y[:, d], _state(initial_h, d, (B, H), y.dtype), valid, reverse)
        found.append(_replace(reset, _state(reset_h, d, (B, H), y.dtype)[None], previous))
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
        zr, zr_derivative = _restore_gate(gates_t[:, : 2 * H], clip, jax.nn.sigmoid, _sigmoid_derivative)
        n, n_derivative = _restore_gate(gates_t[:, 2 * H : 3 * H], clip, jnp.tanh, _tanh_derivative)
        z, gate = jnp.split(zr, 2, axis=1)
        dn = out * (1 - z) * n_derivative
        dz = out * (h - n) * zr_derivative[:, :H]
        if linear_before_reset:
            dr = dn * gates_t[:, 3 * H :] * zr_derivative[:, H:]
            dgates = _keep(valid_t, jnp.concatenate([dz, dr, dn], 1))
            recurrent = jnp.concatenate([dgates[:, : 2 * H], dgates[:, 2 * H :] * gate], 1)
            new_dh = z * out + _dot(params, recurrent, r, dtype)
        else:
            dgated_h = _dot(params, dn, r[2 * H :], dtype)
            dr = dgated_h * h * zr_derivative[:, H:]
            dgates = _keep(valid_t, jnp.concatenate([dz, dr, dn], 1))
            new_dh = z * out + dgated_h * gate + _dot(params, dgates[:, : 2 * H], r[: 2 * H], dtype)
        if valid_t is not None:
            new_dh = jnp.where(valid_t, new_dh, dh)
        if reset_t is not None:
            dreset_h = None if dreset_h is None else dreset_h + jnp.where(reset_t, new_dh, 0)
            new_dh = jnp.where(reset_t, 0, new_dh)
        return (new_dh, dreset_h), dgates

    return lax.scan(step, last, steps, reverse=not reverse, unroll=_unroll(T))


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
    """
    valid = _valid(sequence_lens, x.shape[0])
    dtype = _compute_dtype(x)
    dx = None
    if needs_grad[0]:
        of_directions = (_keep(valid, _dot(params, dgate, w[d], dtype)) for d, dgate in enumerate(dgates))
        dx = functools.reduce(jnp.add, of_directions).astype(x.dtype)
    recurrent: Sequence[jax.Array | None] = recurrent_dgates or [None] * len(dgates)
    of_weights = [
        _weight_gradients(params, dgate, dgate_r, gates[:, d], states, x, valid, needs_grad)
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
) -> tuple[jax.Array | None, jax.Array | None, jax.Array | None]:
    """Returns dw [3H, I], dr [3H, H] and db [6H] of one direction, by products over all steps."""
    linear_before_reset, clip = params.linear_before_reset, params.clip
    needs_dw, needs_dr, needs_db = needs_grad[1:4]
    dtype, H = _compute_dtype(x), previous.shape[2]

    def product(dgate: jax.Array, operand: jax.Array) -> jax.Array:
        operand = _keep(valid, operand)  # padding may hold NaN, whose product with a zero of dgate is NaN
        dims = (((0, 1), (0, 1)), ((), ()))
        return lax.dot_general(dgate.astype(x.dtype), operand.astype(x.dtype), dims, params.precision, dtype)

    dw = product(dgates, x) if needs_dw else None
    if recurrent_dgates is not None:
        dr = product(recurrent_dgates, previous) if needs_dr else None
        db = jnp.concatenate([g.sum((0, 1), dtype) for g in (dgates, recurrent_dgates)]) if needs_db else None
        return dw, dr, db
    dzr, dn = dgates[..., : 2 * H], dgates[..., 2 * H :].astype(dtype)
    gate = _restore_gate(gates[..., H : 2 * H].astype(dtype), clip, jax.nn.sigmoid, _sigmoid_derivative)[0]
    if linear_before_reset:
        dn_recurrent, state_n = _keep(valid, dn * gate), previous
    else:
        dn_recurrent, state_n = dn, gate * previous.astype(dtype)
    dr = jnp.concatenate([product(dzr, previous), product(dn_recurrent, state_n)]) if needs_dr else None
    db = jnp.concatenate([g.sum((0, 1), dtype) for g in (dgates, dzr, dn_recurrent)]) if needs_db else None
    return dw, dr, db
