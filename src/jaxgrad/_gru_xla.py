"""The GRU on plain XLA: a scan, and a hand-written backward whose weight gradients are one product after the loop.

It runs wherever no kernel does, and it is what gradients of gradients are taken of. Both this and the kernels keep the
same residuals, so that either backward can follow either forward:

  y      [T, D, B, H]      the hidden states, zero past a row's length
  gates  [T, D, B, 3H]     z, r, n after their activations; with `linear_before_reset` [T, D, B, 4H]: h Rh' + Rbh too

A pre-activation that `clip` bounded is stored as +CLIPPED or -CLIPPED, values that no gate takes: its gate is the
activation of +clip or -clip and its gradient is zero.

Arithmetic is float32, float64 where the arrays are float64.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

CLIPPED = 2.0
_UNROLL = 4  # steps of the scan unrolled in one loop body: measured best or near it from H = 128 to 1024


class Gradients(NamedTuple):
    """The gradients of a GRU's inputs; None where not wanted."""

    x: jax.Array | None
    w: jax.Array | None
    r: jax.Array | None
    b: jax.Array | None
    initial_h: jax.Array | None


def _compute_dtype(array: jax.Array) -> jnp.dtype:
    return jnp.promote_types(array.dtype, jnp.float32)


def _dot(a: jax.Array, b: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """a[..., k] b[k, n], read in the storage dtype and summed in the compute dtype."""
    return lax.dot_general(a.astype(b.dtype), b, (((a.ndim - 1,), (0,)), ((), ())), preferred_element_type=dtype)


def _valid(sequence_lens: jax.Array | None, T: int) -> jax.Array | None:
    """[T, B, 1]: which steps lie within their row's length. Lengths out of [0, T] are taken as the nearest in it."""
    return None if sequence_lens is None else (jnp.arange(T)[:, None] < sequence_lens[None, :])[..., None]


def _clip(gate: jax.Array, clip: float | None) -> jax.Array:
    return gate if clip is None else jnp.clip(gate, -clip, clip)


def _mark_clipped(gate: jax.Array, before: jax.Array, clip: float | None) -> jax.Array:
    if clip is None:
        return gate
    return jnp.where(before >= clip, CLIPPED, jnp.where(before <= -clip, -CLIPPED, gate))


def _unmark(gates: jax.Array, clip: float | None, activation, slope) -> tuple[jax.Array, jax.Array]:
    """A stored gate and the slope of its activation there."""
    if clip is None:
        return gates, slope(gates)
    clipped = jnp.abs(gates) > 1.5
    value = jnp.where(clipped, activation(jnp.sign(gates) * clip), gates)
    return value, jnp.where(clipped, 0, slope(value))


def _sigmoid_slope(s: jax.Array) -> jax.Array:
    return s * (1 - s)


def _tanh_slope(t: jax.Array) -> jax.Array:
    return 1 - t * t


def _scans_in_reverse(direction: str) -> tuple[bool, ...]:
    return {"forward": (False,), "reverse": (True,), "bidirectional": (False, True)}[direction]


def forward(
    x: jax.Array,
    w: jax.Array,
    r: jax.Array,
    b: jax.Array | None,
    sequence_lens: jax.Array | None,
    initial_h: jax.Array | None,
    *,
    direction: str,
    linear_before_reset: bool,
    clip: float | None,
    training: bool,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`(y, y_h, gates)`; `gates` has no elements unless `training`."""
    T, B, _ = x.shape
    H = r.shape[2]
    dtype = _compute_dtype(x)
    valid = _valid(sequence_lens, T)

    def one_direction(d: int, reverse: bool) -> tuple[jax.Array, jax.Array, jax.Array]:
        wb, rb = (jnp.zeros((2, 3 * H), dtype) if b is None else b[d].astype(dtype).reshape(2, 3 * H))
        h0 = jnp.zeros((B, H), dtype) if initial_h is None else initial_h[d].astype(dtype)
        rt = r[d].T
        # Every bias that is added outside the reset gate's product joins the input product.
        bias = wb.at[: 2 * H].add(rb[: 2 * H]) if linear_before_reset else wb + rb
        inputs = _dot(x, w[d].T, dtype) + bias

        def step(h, t):
            input_t, valid_t = t
            if linear_before_reset:
                product = _dot(h, rt, dtype)
                recurrent = product[:, 2 * H :] + rb[2 * H :]
            else:
                product = _dot(h, rt[:, : 2 * H], dtype)
            zr = input_t[:, : 2 * H] + product[:, : 2 * H]
            z, reset = jnp.split(jax.nn.sigmoid(_clip(zr, clip)), 2, axis=1)
            if linear_before_reset:
                candidate = input_t[:, 2 * H :] + reset * recurrent
            else:
                candidate = input_t[:, 2 * H :] + _dot(reset * h, rt[:, 2 * H :], dtype)
            n = jnp.tanh(_clip(candidate, clip))
            new_h = (1 - z) * n + z * h
            y = new_h
            if valid_t is not None:
                new_h, y = jnp.where(valid_t, new_h, h), jnp.where(valid_t, new_h, 0)
            if not training:
                return new_h, (y.astype(x.dtype), jnp.zeros((0,), x.dtype))
            gates = [_mark_clipped(jnp.concatenate([z, reset], 1), zr, clip), _mark_clipped(n, candidate, clip)]
            if linear_before_reset:
                gates.append(recurrent)
            return new_h, (y.astype(x.dtype), jnp.concatenate(gates, 1).astype(x.dtype))

        y_h, (y, gates) = lax.scan(step, h0, (inputs, valid), reverse=reverse, unroll=min(_UNROLL, max(T, 1)))
        return y, y_h.astype(x.dtype), gates

    ys, y_hs, gates = zip(*(one_direction(d, rev) for d, rev in enumerate(_scans_in_reverse(direction))), strict=True)
    return jnp.stack(ys, 1), jnp.stack(y_hs), jnp.stack(gates, 1) if training else jnp.zeros((0,), x.dtype)


def backward(
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
    direction: str,
    linear_before_reset: bool,
    clip: float | None,
    wanted: tuple[bool, bool, bool, bool, bool],
) -> Gradients:
    """The gradients from the residuals, only those `wanted` of (x, w, r, b, initial_h).

    Per step, with dh the gradient that reaches h' = (1 - z) n + z h:
      dn = dh (1 - z) tanh'     dz = dh (h - n) sigmoid'
      linear_before_reset=0: dr = (dn Rh) h sigmoid',  dh += z dh + (dn Rh) r + [dz, dr] [Rz; Rr]
      linear_before_reset=1: dr = dn (h Rh' + Rbh) sigmoid',  dh += z dh + [dz, dr, r dn] R
    """
    T, B, _ = x.shape
    H = r.shape[2]
    dtype = _compute_dtype(x)
    valid = _valid(sequence_lens, T)
    want_x, want_w, want_r, want_b, want_h0 = wanted

    def one_direction(d: int, reverse: bool) -> Gradients:
        h0 = jnp.zeros((B, H), y.dtype) if initial_h is None else initial_h[d]
        states = y[:, d]
        before = [states[1:], h0[None]] if reverse else [h0[None], states[:-1]]
        previous = jnp.concatenate(before) if T else states
        if valid is not None and reverse:  # the state before a row's first step, at its last index, is h0
            starts = jnp.concatenate([valid[1:], jnp.zeros_like(valid[:1])])
            previous = jnp.where(starts, previous, h0)

        def step(dh, t):
            gates_t, h, valid_t, dy_t = t
            out = dh if dy_t is None else dh + dy_t.astype(dtype)
            gates_t, h = gates_t.astype(dtype), h.astype(dtype)
            zr, zr_slope = _unmark(gates_t[:, : 2 * H], clip, jax.nn.sigmoid, _sigmoid_slope)
            n, n_slope = _unmark(gates_t[:, 2 * H : 3 * H], clip, jnp.tanh, _tanh_slope)
            z, reset = jnp.split(zr, 2, axis=1)
            dn = out * (1 - z) * n_slope
            dz = out * (h - n) * zr_slope[:, :H]
            if valid_t is not None:
                dn, dz = jnp.where(valid_t, dn, 0), jnp.where(valid_t, dz, 0)
            if linear_before_reset:
                dr = dn * gates_t[:, 3 * H :] * zr_slope[:, H:]
                if valid_t is not None:
                    dr = jnp.where(valid_t, dr, 0)
                dgates = jnp.concatenate([dz, dr, dn], 1)
                dh_new = z * out + _dot(jnp.concatenate([dz, dr, dn * reset], 1), r[d], dtype)
            else:
                dreset_h = _dot(dn, r[d, 2 * H :], dtype)
                dr = dreset_h * h * zr_slope[:, H:]
                if valid_t is not None:
                    dr = jnp.where(valid_t, dr, 0)
                dgates = jnp.concatenate([dz, dr, dn], 1)
                dh_new = z * out + dreset_h * reset + _dot(dgates[:, : 2 * H], r[d, : 2 * H], dtype)
            if valid_t is not None:
                dh_new = jnp.where(valid_t, dh_new, dh)
            return dh_new, dgates

        dh_last = jnp.zeros((B, H), dtype) if dy_h is None else dy_h[d].astype(dtype)
        dy_d = None if dy is None else dy[:, d]
        dh0, dgates = lax.scan(
            step,
            dh_last,
            (gates[:, d], previous, valid, dy_d),
            reverse=not reverse,
            unroll=min(_UNROLL, max(T, 1)),
        )

        def weight_gradient(dgate: jax.Array, operand: jax.Array) -> jax.Array:
            if valid is not None:  # padding may hold anything, NaN too, and must not meet the zeros of dgate
                operand = jnp.where(valid, operand, 0)
            product = lax.dot_general(
                dgate.astype(x.dtype), operand.astype(x.dtype), (((0, 1), (0, 1)), ((), ())), preferred_element_type=dtype
            )
            return product

        reset = _unmark(gates[:, d, :, H : 2 * H].astype(dtype), clip, jax.nn.sigmoid, _sigmoid_slope)[0]
        dn = dgates[..., 2 * H :]
        dn_recurrent, operand_n = (dn * reset, previous) if linear_before_reset else (dn, reset * previous.astype(dtype))
        dx = dw = dr = db = None
        if want_x:
            dx = _dot(dgates, w[d], dtype)
        if want_w:
            dw = weight_gradient(dgates, x).astype(x.dtype)
        if want_r:
            dzr = weight_gradient(dgates[..., : 2 * H], previous)
            dr = jnp.concatenate([dzr, weight_gradient(dn_recurrent, operand_n)]).astype(x.dtype)
        if want_b:
            db_zr, db_n = dgates[..., : 2 * H].sum((0, 1)), dn.sum((0, 1))
            db_rn = jnp.where(valid, dn_recurrent, 0).sum((0, 1)) if valid is not None else dn_recurrent.sum((0, 1))
            db = jnp.concatenate([db_zr, db_n, db_zr, db_rn]).astype(x.dtype)
        return Gradients(dx, dw, dr, db, dh0.astype(x.dtype) if want_h0 else None)

    per_direction = [one_direction(d, rev) for d, rev in enumerate(_scans_in_reverse(direction))]
    dx = sum(g.x for g in per_direction).astype(x.dtype) if want_x else None
    stacked = [jnp.stack(g) if want else None for g, want in zip(zip(*(p[1:] for p in per_direction)), wanted[1:])]
    return Gradients(dx, *stacked)
