"""References for the GRU in float64, written from the formulas in the docstring of `jaxgrad.gru`.

`numpy_forward` slices each row to its length, reverses it where asked, and steps through it. `forward` is a `lax.scan`
over one row, mapped over the rows, which reads its steps in a precomputed order; JAX differentiates it to any order.
tests/gru/test_references.py compares the two, and the gradients with finite differences.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from backends import float64_on_cpu
from gru_cases import Case, Cotangents, Inputs, make_inputs
from jax import lax
from tolerances import EPS

_REVERSED = {"forward": (False,), "reverse": (True,), "bidirectional": (False, True)}


def _filled(inputs: Inputs) -> Inputs:
    """`inputs` with defaults for absent arrays: zero biases and states, full lengths, no resets."""
    T, B, _ = inputs.x.shape
    D, _, H = inputs.r.shape
    return Inputs(
        inputs.x,
        inputs.w,
        inputs.r,
        np.zeros((D, 6 * H)) if inputs.b is None else inputs.b,
        np.full(B, T, np.int32) if inputs.sequence_lens is None else inputs.sequence_lens,
        np.zeros((D, B, H)) if inputs.initial_h is None else inputs.initial_h,
        np.zeros((T, B), bool) if inputs.reset is None else inputs.reset,
        np.zeros((D, B, H)) if inputs.reset_h is None else inputs.reset_h,
    )


def _sigmoid(a: np.ndarray) -> np.ndarray:
    return 0.5 * (1 + np.tanh(0.5 * a))


def numpy_forward(
    inputs: Inputs, *, direction: str, linear_before_reset: bool, clip: float | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """`(y, y_h, before)` in float64; `before` are all the activations' inputs, [T, D, B, 3H], zero past the lengths."""
    given = (np.asarray(a).astype(np.float64) for a in _filled(inputs))
    x, w, r, b, sequence_lens, initial_h, reset, reset_h = given
    T, B, _ = x.shape
    D, _, H = r.shape
    y, y_h, before = np.zeros((T, D, B, H)), initial_h.copy(), np.zeros((T, D, B, 3 * H))
    bound = np.inf if clip is None else clip
    for d, is_reversed in enumerate(_REVERSED[direction]):
        (wz, wr, wh), (rz, rr, rh) = np.split(w[d], 3), np.split(r[d], 3)
        wbz, wbr, wbh, rbz, rbr, rbh = np.split(b[d], 6)
        for row in range(B):
            steps = range(int(sequence_lens[row]))
            h = initial_h[d, row]
            for t in reversed(steps) if is_reversed else steps:
                h = reset_h[d, row] if reset[t, row] else h
                z_in = wz @ x[t, row] + rz @ h + wbz + rbz
                r_in = wr @ x[t, row] + rr @ h + wbr + rbr
                gate = _sigmoid(np.clip(r_in, -bound, bound))
                if linear_before_reset:
                    n_in = wh @ x[t, row] + gate * (rh @ h + rbh) + wbh
                else:
                    n_in = wh @ x[t, row] + rh @ (gate * h) + rbh + wbh
                z, n = _sigmoid(np.clip(z_in, -bound, bound)), np.tanh(np.clip(n_in, -bound, bound))
                h = (1 - z) * n + z * h
                y[t, d, row] = h
                before[t, d, row] = np.concatenate([z_in, r_in, n_in])
            y_h[d, row] = h
    return y, y_h, before


def is_clear_of_the_bounds(case: Case, dtype: str) -> bool:
    """Whether every gate of a case lies so far from `clip` that rounding cannot put it on the other side.

    The gradient jumps there, so that no tolerance could cover a gate which two routes place on either side.
    """
    if case.clip is None:
        return True
    # The 16-bit types round the states that the recurrent product reads.
    margin = (4 if dtype in ("bfloat16", "float16") else 100) * EPS[dtype]
    _, _, before = numpy_forward(make_inputs(case, dtype)[0], **case.settings)
    return bool(np.all(np.abs(np.abs(before) - case.clip) > margin))


def _order(T: int, sequence_lens, is_reversed: bool):
    """[T, B]: the step that each row takes at each turn; those past its length keep their place."""
    turns = jnp.arange(T)[:, None]
    if not is_reversed:
        return jnp.broadcast_to(turns, (T, sequence_lens.shape[0]))
    return jnp.where(turns < sequence_lens, sequence_lens - 1 - turns, turns)


def _one_row(x, w, r, b, initial_h, reset_h, reset, order, length, linear_before_reset: bool, clip: float | None):
    """One row in one direction: `(y [T, H], y_h [H])`."""
    (wz, wr, wh), (rz, rr, rh) = jnp.split(w, 3), jnp.split(r, 3)
    wbz, wbr, wbh, rbz, rbr, rbh = jnp.split(b, 6)

    def bound(a):
        return a if clip is None else jnp.clip(a, -clip, clip)

    def step(h, turn_and_step):
        turn, t = turn_and_step
        within = turn < length
        h = jnp.where(reset[t] & within, reset_h, h)
        z = jax.nn.sigmoid(bound(wz @ x[t] + rz @ h + wbz + rbz))
        gate = jax.nn.sigmoid(bound(wr @ x[t] + rr @ h + wbr + rbr))
        if linear_before_reset:
            n = jnp.tanh(bound(wh @ x[t] + gate * (rh @ h + rbh) + wbh))
        else:
            n = jnp.tanh(bound(wh @ x[t] + rh @ (gate * h) + rbh + wbh))
        new_h = (1 - z) * n + z * h
        return jnp.where(within, new_h, h), jnp.where(within, new_h, 0)

    y_h, turns = lax.scan(step, initial_h, (jnp.arange(x.shape[0]), order))
    return jnp.zeros_like(turns).at[order].set(turns), y_h


def _rows(**settings):
    """`_one_row` for all rows."""
    in_axes = (1, None, None, None, 0, 0, 1, 1, 0)
    return jax.vmap(partial(_one_row, **settings), in_axes=in_axes, out_axes=(1, 0))


def forward(*arrays, direction="forward", linear_before_reset=False, clip=None):
    """`(y, y_h)`, traceable and differentiable, of the arrays of `Inputs` in order."""
    x, w, r, b, lens, initial_h, reset, reset_h = map(jnp.asarray, _filled(Inputs(*arrays)))
    rows = _rows(linear_before_reset=linear_before_reset, clip=clip)
    results = [
        rows(x, w[d], r[d], b[d], initial_h[d], reset_h[d], reset, _order(x.shape[0], lens, is_reversed), lens)
        for d, is_reversed in enumerate(_REVERSED[direction])
    ]
    return jnp.stack([y for y, _ in results], 1), jnp.stack([y_h for _, y_h in results])


@cache  # the compiled programs outlive `jax.clear_caches`, which runs after each test module
def _compiled_vjp(shapes: Any, linear_before_reset: bool) -> Callable[..., Any]:
    """`_one_direction_vjp` for arguments of these shapes and dtypes."""
    one_direction = jax.jit(partial(_one_direction_vjp, linear_before_reset=linear_before_reset))
    return one_direction.lower(*shapes).compile()


def _one_direction_vjp(inputs, order, cotangents, clip, *, linear_before_reset):
    rows = _rows(linear_before_reset=linear_before_reset, clip=clip)

    def outputs(x, w, r, b, initial_h, reset_h):
        return rows(x, w, r, b, initial_h, reset_h, inputs.reset, order, inputs.sequence_lens)

    differentiable = inputs.x, inputs.w, inputs.r, inputs.b, inputs.initial_h, inputs.reset_h
    results, pullback = jax.vjp(outputs, *differentiable)
    return results, pullback(tuple(cotangents))


# One size for all small calls, so that they share one compilation: T, B, I, H.
_SHARED_SIZES = (10, 24, 64, 66)


def _embed(array, shape: tuple[int, ...]) -> np.ndarray:
    """A float64 array of `shape`, zero but for `array` in its first corner."""
    embedded = np.zeros(shape)
    embedded[tuple(map(slice, np.shape(array)))] = np.asarray(array).astype(np.float64)
    return embedded


def values_and_gradients(
    inputs: Inputs,
    cotangents: Cotangents,
    *,
    direction: str,
    linear_before_reset: bool,
    clip: float | None,
    exact_sizes: bool = False,
) -> tuple[np.ndarray, np.ndarray, Inputs]:
    """`(y, y_h, gradients)`, NumPy in float64; an absent cotangent counts as zeros, an absent input has no gradient.

    Each direction is differentiated by itself, and unless `exact_sizes` is set a small call is embedded in a larger one
    with weights, states and lengths of zero, which change nothing as long as all is finite.
    """
    x, w, r, b, sequence_lens, initial_h, reset, reset_h = _filled(inputs)
    T, B, I = sizes = x.shape  # noqa: E741
    D, _, H = r.shape
    sizes = (*sizes, H)
    fits = all(n <= shared for n, shared in zip(sizes, _SHARED_SIZES, strict=True))
    T2, B2, I2, H2 = sizes if exact_sizes or not fits else _SHARED_SIZES
    dy = np.zeros((T, D, B, H)) if cotangents.y is None else cotangents.y
    dy_h = np.zeros((D, B, H)) if cotangents.y_h is None else cotangents.y_h
    bound = np.float64(np.inf if clip is None else clip)

    results = []
    with float64_on_cpu():
        for d, is_reversed in enumerate(_REVERSED[direction]):
            one = Inputs(
                _embed(x, (T2, B2, I2)),
                _embed(w[d].reshape(3, H, I), (3, H2, I2)).reshape(3 * H2, I2),
                _embed(r[d].reshape(3, H, H), (3, H2, H2)).reshape(3 * H2, H2),
                _embed(b[d].reshape(6, H), (6, H2)).reshape(6 * H2),
                _embed(sequence_lens, (B2,)).astype(np.int32),
                _embed(initial_h[d], (B2, H2)),
                _embed(reset, (T2, B2)).astype(bool),
                _embed(reset_h[d], (B2, H2)),
            )
            back = _embed(dy[:, d], (T2, B2, H2)), _embed(dy_h[d], (B2, H2))
            order = _order(T2, jnp.asarray(one.sequence_lens), is_reversed)
            arguments = one, order, back, bound
            shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), arguments)
            values, gradients = _compiled_vjp(shapes, linear_before_reset)(*arguments)
            results.append(jax.tree.map(np.asarray, (*values, *gradients)))

    y, y_h, dx, dw, dr, db, dh0, dreset_h = (np.stack(parts) for parts in zip(*results, strict=True))
    dw = dw.reshape(D, 3, H2, I2)[:, :, :H, :I].reshape(D, 3 * H, I)
    dr = dr.reshape(D, 3, H2, H2)[:, :, :H, :H].reshape(D, 3 * H, H)
    db = db.reshape(D, 6, H2)[:, :, :H].reshape(D, 6 * H) if inputs.b is not None else None
    dh0 = dh0[:, :B, :H] if inputs.initial_h is not None else None
    dreset_h = dreset_h[:, :B, :H] if inputs.reset_h is not None else None
    gradients = Inputs(dx.sum(0)[:T, :B, :I], dw, dr, db, None, dh0, None, dreset_h)
    return np.moveaxis(y, 0, 1)[:T, :, :B, :H], y_h[:, :B, :H], gradients


def row_by_row(
    inputs: Inputs, cotangents: Cotangents, *, direction: str, linear_before_reset: bool, clip: float | None
) -> tuple[np.ndarray, np.ndarray, Inputs]:
    """`values_and_gradients` for nonfinite inputs: each row is cut to its length, without padding."""
    x, w, r, b, sequence_lens, initial_h, reset, reset_h = _filled(inputs)
    T, B, I = x.shape  # noqa: E741
    D, _, H = r.shape
    y, y_h, dx = np.zeros((T, D, B, H)), np.zeros((D, B, H)), np.zeros((T, B, I))
    dw, dr, db, dh0, dreset_h = (np.zeros(a.shape) for a in (w, r, b, initial_h, reset_h))
    for row in range(B):
        length, here = int(sequence_lens[row]), slice(row, row + 1)
        if length == 0:
            y_h[:, here], dh0[:, here] = initial_h[:, here], cotangents.y_h[:, here]
            continue
        states = initial_h[:, here], reset[:length, here], reset_h[:, here]
        cut = Inputs(x[:length, here], w, r, b, None, *states)
        back = Cotangents(cotangents.y[:length, :, here], cotangents.y_h[:, here])
        settings = {"direction": direction, "linear_before_reset": linear_before_reset, "clip": clip}
        y[:length, :, here], y_h[:, here], gradients = values_and_gradients(cut, back, **settings, exact_sizes=True)
        dx[:length, here], dh0[:, here] = gradients.x, gradients.initial_h
        dreset_h[:, here] = gradients.reset_h
        for total, gradient in ((dw, gradients.w), (dr, gradients.r), (db, gradients.b)):
            total += gradient
    return y, y_h, Inputs(dx, dw, dr, db, None, dh0, None, dreset_h)
