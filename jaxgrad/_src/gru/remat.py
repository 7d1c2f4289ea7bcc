"""`remat_every`: a GRU in chunks of steps, of which the backward pass computes one after the other again.

Each chunk is one call of the op under `jax.checkpoint`, so that only the states between the chunks are residuals.

The two directions of a bidirectional GRU run one after the other. At any time they need different chunks of x, which no
call takes: a call with two groups would need both in the same direction, and a row that is reversed within its length
starts with padding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from jaxgrad._src.gru import autodiff, jvp
from jaxgrad._src.gru.params import GruParams
from jaxgrad._src.run import forward_mode
from jaxgrad._src.run.mesh_axes import explicit_mesh, pvary_to_match


def call(params: GruParams, *operands: Any) -> tuple[jax.Array, jax.Array]:
    """Returns `(y, y_h)` of x, w, r, b, sequence_lens, initial_h, reset and reset_h."""
    y, y_h = forward_mode.call(autodiff.gru, jvp.RULES, params, *pvary_to_match(*operands))
    return y, y_h


def gru_in_chunks(
    params_of: Callable[[str, Any, Any], GruParams], every: int, direction: str, operands: Sequence[Any]
) -> tuple[jax.Array, jax.Array]:
    """Returns `(y, y_h)`.

    Args:
      params_of: the parameters of a call, of its direction and the shapes of x and r.
      every: the number of steps of a chunk.
      direction: as in `jaxgrad.gru`.
      operands: as in `call`.
    """
    if direction == "bidirectional":
        directions = ("forward", "reverse")
        found = [gru_in_chunks(params_of, every, name, _of_direction(operands, d)) for d, name in enumerate(directions)]
        return jnp.concatenate([y for y, _ in found], 1), jnp.concatenate([last for _, last in found])
    x, _, r, *_ = operands
    T = x.shape[0]
    sizes = every if every <= T else 0, T % every
    of_chunk, of_rest = (
        params_of(direction, jax.ShapeDtypeStruct((steps, *x.shape[1:]), x.dtype), r) if steps else None
        for steps in sizes
    )
    return _gru_in_chunks(every, direction == "reverse", of_chunk, of_rest, *operands)


@partial(jax.jit, static_argnums=(0, 1, 2, 3))  # outside `jax.jit`, every call would compile its loops
def _gru_in_chunks(
    every: int, is_reversed: bool, of_chunk: GruParams | None, of_rest: GruParams | None, *operands: Any
) -> tuple[jax.Array, jax.Array]:
    x, w, r, b, sequence_lens, initial_h, reset, reset_h = operands
    T, B, _ = x.shape
    chunks, rest = divmod(T, every)
    h = jnp.zeros((1, B, r.shape[2]), x.dtype) if initial_h is None else initial_h
    h, _ = pvary_to_match(h, x)
    if mesh := explicit_mesh(x):  # rows are split as those of x, like the state after a chunk
        h = jax.sharding.reshard(h, NamedSharding(mesh, PartitionSpec(None, jax.typeof(x).sharding.spec[1], None)))
    # The gradients of these are sums over the chunks, which a 16-bit type would round after each of them.
    shared = jax.tree.map(_widened, (w, r, b, reset_h))

    def chunk(
        params: Any, h: jax.Array, shared: Any, lens: jax.Array | None, steps: Any
    ) -> tuple[jax.Array, jax.Array]:
        first, x_chunk, reset_chunk = steps
        w, r, b, reset_h = jax.tree.map(lambda array: array.astype(x.dtype), shared)
        lens = None if lens is None else _lengths_in_chunk(lens, first, x_chunk.shape[0], T)
        y, h = call(params, x_chunk, w, r, b, lens, h, reset_chunk, reset_h)
        return h, y

    def in_chunks(array: jax.Array | None) -> jax.Array | None:
        return None if array is None else array[: chunks * every].reshape(chunks, every, *array.shape[1:])

    def after_chunks(h: jax.Array) -> tuple[jax.Array, jax.Array]:
        rest_of_reset = None if reset is None else reset[chunks * every :]
        steps = chunks * every, x[chunks * every :], rest_of_reset
        return jax.checkpoint(partial(chunk, of_rest))(h, shared, sequence_lens, steps)

    ys = []
    if rest and is_reversed:
        h, y = after_chunks(h)
        ys.append(y)
    if chunks:
        steps = jnp.arange(chunks) * every, in_chunks(x), in_chunks(reset)
        # Forward and backward pass are different loops, in which XLA finds no common subexpressions.
        in_scan = jax.checkpoint(partial(chunk, of_chunk), prevent_cse=False)
        h, y = lax.scan(lambda h, steps: in_scan(h, shared, sequence_lens, steps), h, steps, reverse=is_reversed)
        ys.insert(0, y.reshape(chunks * every, *y.shape[2:]))
    if rest and not is_reversed:
        h, y = after_chunks(h)
        ys.append(y)
    return (ys[0] if len(ys) == 1 else jnp.concatenate(ys)), h


def _of_direction(operands: Sequence[Any], d: int) -> list[Any]:
    x, w, r, b, sequence_lens, initial_h, reset, reset_h = operands
    w, r, b, initial_h, reset_h = (None if a is None else a[d : d + 1] for a in (w, r, b, initial_h, reset_h))
    return [x, w, r, b, sequence_lens, initial_h, reset, reset_h]


def _widened(array: jax.Array) -> jax.Array:
    return array.astype(jnp.float32) if array.dtype.itemsize == 2 else array


def _lengths_in_chunk(lens: jax.Array, first: Any, steps: int, T: int) -> jax.Array:
    """The lengths [B] of the rows of a chunk, which starts with step `first`. An invalid length stays invalid."""
    within = jnp.clip(lens - jnp.asarray(first, lens.dtype), 0, steps)
    return jnp.where(lens > T, steps + 1, jnp.where(lens < 0, -1, within)).astype(lens.dtype)
