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

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxgrad._partitioning import vary_alike

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
    return jnp.dtype(jnp.float32) if array.dtype.itemsize == 2 else array.dtype


def _dot(a: jax.Array, b: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """a[..., k] b[k, n], read in the storage dtype and summed in the compute dtype."""
    return lax.dot_general(a.astype(b.dtype), b, (((a.ndim - 1,), (0,)), ((), ())), preferred_element_type=dtype)


def _valid(sequence_lens: jax.Array | None, T: int) -> jax.Array | None:
    """[T, B, 1]: which steps lie within their row's length. Lengths out of [0, T] are taken as the nearest in it."""
    return (
        None
        if sequence_lens is None
        else (jnp.arange(T, dtype=sequence_lens.dtype)[:, None] < sequence_lens[None, :])[..., None]
    )


def _keep(valid: jax.Array | None, array: jax.Array) -> jax.Array:
    """Zeros where a step lies past its row's length, NaN or not."""
    return array if valid is None else jnp.where(valid, array, 0)


def _clip(gate: jax.Array, clip: float | None) -> jax.Array:
    return gate if clip is None else jnp.clip(gate, -clip, clip)


def _mark_clipped(gate: jax.Array, before: jax.Array, clip: float | None) -> jax.Array:
    if clip is None:
        return gate
    return jnp.where(before >= clip, CLIPPED, jnp.where(before <= -clip, -CLIPPED, gate))


def _unmark(
    gates: jax.Array,
    clip: float | None,
    activation: Callable[[jax.Array], jax.Array],
    slope: Callable[[jax.Array], jax.Array],
) -> tuple[jax.Array, jax.Array]:
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
    x = _keep(valid, x)  # what the padding holds must not reach derivatives of this either

    def one_direction(d: int, reverse: bool) -> tuple[jax.Array, jax.Array, jax.Array]:
        wb, rb = jnp.zeros((2, 3 * H), dtype) if b is None else b[d].astype(dtype).reshape(2, 3 * H)
        h0 = jnp.zeros((B, H), dtype) if initial_h is None else initial_h[d].astype(dtype)
        h0, _ = vary_alike(h0, x)  # a loop's carry begins with the marks that it ends with
        rt = r[d].T
        # Every bias that is added outside the reset gate's product joins the input product.
        bias = wb.at[: 2 * H].add(rb[: 2 * H]) if linear_before_reset else wb + rb
        inputs = _dot(x, w[d].T, dtype) + bias[None, None]

        def step(h, t):
            input_t, valid_t = t
            if linear_before_reset:
                product = _dot(h, rt, dtype)
                recurrent = product[:, 2 * H :] + rb[None, 2 * H :]
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
    wanted: tuple[bool, ...],
) -> Gradients:
    """The gradients from the residuals, only those `wanted` of (x, w, r, b, initial_h).

    Per step, with dh the gradient that reaches h' = (1 - z) n + z h:
      dn = dh (1 - z) tanh'     dz = dh (h - n) sigmoid'
      linear_before_reset=0: dr = (dn Rh) h sigmoid',  dh += z dh + (dn Rh) r + [dz, dr] [Rz; Rr]
      linear_before_reset=1: dr = dn (h Rh' + Rbh) sigmoid',  dh += z dh + [dz, dr, r dn] R
    """
    T, B, _ = x.shape
    dtype = _compute_dtype(x)
    valid = _valid(sequence_lens, T)
    found = []
    for d, reverse in enumerate(_scans_in_reverse(direction)):
        h0 = jnp.zeros((B, r.shape[2]), y.dtype) if initial_h is None else initial_h[d]
        previous = _previous_states(y[:, d], h0, valid, reverse)
        dh_last = jnp.zeros(h0.shape, dtype) if dy_h is None else dy_h[d].astype(dtype)
        dh_last, _ = vary_alike(dh_last, x)
        dy_d = None if dy is None else dy[:, d]
        dh0, dgates = _backward_scan(
            dh_last, gates[:, d], previous, valid, dy_d, r[d], reverse, linear_before_reset, clip
        )
        dw, dr, db = _weight_gradients(dgates, gates[:, d], previous, x, valid, wanted, linear_before_reset, clip)
        dx = _keep(valid, _dot(dgates, w[d], dtype)) if wanted[0] else None
        found.append(Gradients(dx, dw, dr, db, dh0 if wanted[4] else None))

    def join(name: str) -> jax.Array | None:
        parts = [getattr(gradients, name) for gradients in found]
        if parts[0] is None:
            return None
        joined = functools.reduce(jnp.add, parts) if name == "x" else jnp.stack(parts)
        return joined.astype(x.dtype)

    return Gradients(*map(join, Gradients._fields))


def _previous_states(states: jax.Array, h0: jax.Array, valid: jax.Array | None, reverse: bool) -> jax.Array:
    """[T, B, H]: the state that each step began with."""
    if states.shape[0] == 0:
        return states
    if not reverse:
        return jnp.concatenate([h0[None], states[:-1]])
    previous = jnp.concatenate([states[1:], h0[None]])
    if valid is None:
        return previous
    # A row's first step is the one at its last index: the step after it in memory is padding, and it began with h0.
    follows = jnp.concatenate([valid[1:], jnp.zeros_like(valid[:1])])
    return jnp.where(follows, previous, h0[None])


def _backward_scan(
    dh_last: jax.Array,
    gates: jax.Array,
    previous: jax.Array,
    valid: jax.Array | None,
    dy: jax.Array | None,
    r: jax.Array,
    reverse: bool,
    linear_before_reset: bool,
    clip: float | None,
) -> tuple[jax.Array, jax.Array]:
    """One direction's recurrence: `(dh0 [B, H], dgates [T, B, 3H])`, dgates those of the pre-activations z, r, n."""
    T, _, H = previous.shape
    dtype = dh_last.dtype

    def step(dh, t):
        gates_t, h, valid_t, dy_t = t
        out = dh if dy_t is None else dh + dy_t.astype(dtype)
        gates_t, h = gates_t.astype(dtype), h.astype(dtype)
        zr, zr_slope = _unmark(gates_t[:, : 2 * H], clip, jax.nn.sigmoid, _sigmoid_slope)
        n, n_slope = _unmark(gates_t[:, 2 * H : 3 * H], clip, jnp.tanh, _tanh_slope)
        z, reset = jnp.split(zr, 2, axis=1)
        dn = out * (1 - z) * n_slope
        dz = out * (h - n) * zr_slope[:, :H]
        if linear_before_reset:
            dr = dn * gates_t[:, 3 * H :] * zr_slope[:, H:]
            dgates = _keep(valid_t, jnp.concatenate([dz, dr, dn], 1))
            recurrent = jnp.concatenate([dgates[:, : 2 * H], dgates[:, 2 * H :] * reset], 1)
            new_dh = z * out + _dot(recurrent, r, dtype)
        else:
            dreset_h = _dot(dn, r[2 * H :], dtype)
            dr = dreset_h * h * zr_slope[:, H:]
            dgates = _keep(valid_t, jnp.concatenate([dz, dr, dn], 1))
            new_dh = z * out + dreset_h * reset + _dot(dgates[:, : 2 * H], r[: 2 * H], dtype)
        return (new_dh if valid_t is None else jnp.where(valid_t, new_dh, dh)), dgates

    steps = (gates, previous, valid, dy)
    return lax.scan(step, dh_last, steps, reverse=not reverse, unroll=min(_UNROLL, max(T, 1)))


def _weight_gradients(
    dgates: jax.Array,
    gates: jax.Array,
    previous: jax.Array,
    x: jax.Array,
    valid: jax.Array | None,
    wanted: tuple[bool, ...],
    linear_before_reset: bool,
    clip: float | None,
) -> tuple[jax.Array | None, jax.Array | None, jax.Array | None]:
    """One direction's `(dw [3H, I], dr [3H, H], db [6H])`: products over all steps at once."""
    _, want_w, want_r, want_b, _ = wanted
    dtype, H = dgates.dtype, previous.shape[2]

    def product(dgate: jax.Array, operand: jax.Array) -> jax.Array:
        operand = _keep(valid, operand)  # padding may hold anything, NaN too, and must not meet the zeros of dgate
        dims = (((0, 1), (0, 1)), ((), ()))
        return lax.dot_general(dgate.astype(x.dtype), operand.astype(x.dtype), dims, preferred_element_type=dtype)

    dzr, dn = dgates[..., : 2 * H], dgates[..., 2 * H :]
    reset = _unmark(gates[..., H : 2 * H].astype(dtype), clip, jax.nn.sigmoid, _sigmoid_slope)[0]
    if linear_before_reset:
        dn_recurrent, state_n = _keep(valid, dn * reset), previous
    else:
        dn_recurrent, state_n = dn, reset * previous.astype(dtype)
    dw = product(dgates, x) if want_w else None
    dr = jnp.concatenate([product(dzr, previous), product(dn_recurrent, state_n)]) if want_r else None
    db = jnp.concatenate([g.sum((0, 1)) for g in (dgates, dzr, dn_recurrent)]) if want_b else None
    return dw, dr, db
