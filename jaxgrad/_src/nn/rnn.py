"""A GRU over sequences with the arguments of `RNN` in flax, linen and nnx, which agree."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax.linen.recurrent import flip_sequences

from jaxgrad._src.convert.flax_layers import check_functions
from jaxgrad._src.convert.gru_weights import GRUWeights
from jaxgrad._src.core import checks
from jaxgrad._src.gru.api import gru


def check_cell(name: str, cell: Any, cell_class: type) -> None:
    """Raises an error for a cell that does not compute what `cell_class`, flax's GRU cell, does by default."""
    own = getattr(type(cell), "__call__", None)  # noqa: B004  the function, to see whether a subclass has another
    if not isinstance(cell, cell_class) or own is not cell_class.__call__:
        raise TypeError(
            f"{name}: cell must be a flax GRUCell, got {type(cell).__name__}; use flax's own RNN for other cells"
        )
    check_functions(name, cell, "; use flax's own RNN for others")


def starts_at_zero(cell: Any, cell_class: Any) -> bool:
    """Whether `initialize_carry` of a cell returns zeros, with which resets are faster than with an array."""
    is_own = type(cell).initialize_carry is not cell_class.initialize_carry
    return not is_own and cell.carry_init in (None, jax.nn.initializers.zeros)


def given_or_own(rnn: Any, **given: bool | None) -> dict[str, bool]:
    """The arguments of a call, and the attributes of `rnn` in place of those that are None."""
    return {name: getattr(rnn, name) if value is None else value for name, value in given.items()}


def shape_of_step(inputs: jax.Array, time_major: bool) -> tuple[int, ...]:
    """`(*batch, I)` of inputs [T, *batch, I] or [*batch, T, I]."""
    time_axis = 0 if time_major else inputs.ndim - 2
    return inputs.shape[:time_axis] + inputs.shape[time_axis + 1 :]


def as_arguments(
    name: str,
    cell: Any,
    inputs: Any,
    initial_carry: Any,
    seq_lengths: Any,
    reset: Any,
    *,
    H: int,
    time_major: bool,
) -> tuple[jax.Array, jax.Array | None, jax.Array | None, jax.Array | None]:
    """The arguments of a call as arrays, with the dtypes and shapes that `run_rnn` describes."""
    inputs = checks.as_array(name, "inputs", inputs)
    dims = ("time", "*batch") if time_major else ("*batch", "time")
    if inputs.ndim < 2:
        expected = f"at least 2 dimensions, [{', '.join(dims)}, I]"
        raise ValueError(f"{name}: inputs must have {expected}, got the shape {inputs.shape}")
    if cell.dtype is None or checks.is_key(inputs):  # otherwise the cell casts them
        checks.check_promotable(name, inputs=inputs)
    if initial_carry is not None:
        initial_carry = checks.as_array(name, "initial_carry", initial_carry)
        checks.check_promotable(name, initial_carry=initial_carry)
        sizes = (*shape_of_step(inputs, time_major)[:-1], H)
        checks.check_shape(name, "initial_carry", initial_carry, ("*batch", "H"), sizes)
    if seq_lengths is not None:
        seq_lengths = checks.as_array(name, "seq_lengths", seq_lengths)
        if not jnp.issubdtype(seq_lengths.dtype, jnp.integer):
            raise TypeError(f"{name}: seq_lengths must be an array of ints, got {seq_lengths.dtype.name}")
        checks.check_shape(name, "seq_lengths", seq_lengths, ("*batch",), shape_of_step(inputs, time_major)[:-1])
    if reset is not None:
        reset = checks.as_mask(name, "reset", reset)
        checks.check_shape(name, "reset", reset, dims, inputs.shape[:-1])
    return inputs, initial_carry, seq_lengths, reset


def run_rnn(
    weights: GRUWeights,
    inputs: jax.Array,
    carry: jax.Array,
    *,
    reset: jax.Array | None,
    reset_carry: Callable[[], jax.Array] | None,
    seq_lengths: Any,
    time_major: bool,
    reverse: bool,
    keep_order: bool,
    return_carry: bool,
) -> Any:
    """Returns the results of `RNN.__call__`: the outputs, or `(carry, outputs)`, with the dtype of `carry`.

    As in flax, the steps past the length of a row are computed too; only the final carry depends on the lengths, and
    in reverse the order of the steps.

    Args:
      weights: of one direction, with the dtype of `inputs`.
      inputs: [*batch, T, I] or, with `time_major`, [T, *batch, I].
      carry: [*batch, H].
      reset: [*batch, T] or [T, *batch], bool.
      reset_carry: returns the carry [*batch, H] after a reset; None for zeros.
    """
    time_axis = 0 if time_major else inputs.ndim - 2
    batch, T = carry.shape[:-1], inputs.shape[time_axis]
    rows = math.prod(batch)
    flips_rows = reverse and seq_lengths is not None

    def flip(array: jax.Array) -> jax.Array:
        return flip_sequences(array, seq_lengths, num_batch_dims=len(batch), time_major=time_major)

    def to_rows(array: jax.Array) -> jax.Array:
        """[T, B, ...] or [B, T, ...] of inputs or resets."""
        array = flip(array) if flips_rows else array
        return array.reshape(*((T, rows) if time_major else (rows, T)), *array.shape[1 + len(batch) :])

    def state(carry: jax.Array) -> jax.Array:
        return carry.astype(inputs.dtype).reshape(*((1, rows) if time_major else (rows, 1)), carry.shape[-1])

    y, y_h = gru(
        to_rows(inputs),
        weights.w,
        weights.r,
        weights.b,
        initial_h=state(carry),
        reset=None if reset is None else to_rows(reset),
        reset_h=None if reset is None or reset_carry is None else state(reset_carry()),
        direction="reverse" if reverse and not flips_rows else "forward",
        linear_before_reset=weights.linear_before_reset,
        time_major=time_major,
    )
    y = jnp.squeeze(y, 1 if time_major else 2).astype(carry.dtype)
    if seq_lengths is not None and return_carry:
        steps, row = jnp.reshape(jnp.asarray(seq_lengths), -1) - 1, jnp.arange(rows)
        last = y[steps, row] if time_major else y[row, steps]
    else:
        last = y_h.astype(carry.dtype)
    outputs = y.reshape(*((T, *batch) if time_major else (*batch, T)), y.shape[-1])
    if flips_rows and keep_order:
        outputs = flip(outputs)
    elif reverse and not flips_rows and not keep_order:
        outputs = jnp.flip(outputs, time_axis)
    return (last.reshape(carry.shape), outputs) if return_carry else outputs
