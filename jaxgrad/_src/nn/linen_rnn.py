"""`jaxgrad.nn.linen.RNN`: flax linen's `RNN` of a `GRUCell`, on `jaxgrad.gru`."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.core.scope import in_filter
from flax.linen.dtypes import promote_dtype

from jaxgrad._src.convert.flax_gru import read_cell
from jaxgrad._src.nn.rnn import as_arguments, check_cell, given_or_own, run_rnn, shape_of_step, starts_at_zero

_NAME = "jaxgrad.nn.linen.RNN"


class RNN(nn.RNN):
    """`flax.linen.RNN` of a `flax.linen.GRUCell`, with `jaxgrad.gru` in place of a scan over the cell.

    Constructor, parameters and results are those of `flax.linen.RNN`, and so are the initial values of the parameters:
    checkpoints fit both ways. `flax.linen.Bidirectional` takes it as it is. A step of a rollout calls the cell itself
    with the same parameters. `unroll` has no effect.

    The policy of the cell applies: products are computed in its `dtype`, and the carry and the outputs have the dtype
    of the initial carry, by default `param_dtype`. With a 16-bit `dtype` the carry between the steps is float32, and is
    rounded to `dtype` where it is returned.

    Raises:
      TypeError: the cell is not a `GRUCell`.
      ValueError: the cell has other functions than sigmoid and tanh, or the parameters differ from step to step.

    Examples:
      >>> import flax.linen
      >>> from jaxgrad.nn import linen
      >>> rnn = linen.RNN(flax.linen.GRUCell(64))
      >>> x = jnp.ones((10, 50, 32))
      >>> variables = rnn.init(jax.random.key(0), x)
      >>> rnn.apply(variables, x).shape
      (10, 50, 64)
    """

    def __call__(
        self,
        inputs: jax.Array,
        *,
        initial_carry: jax.Array | None = None,
        init_key: jax.Array | None = None,
        seq_lengths: jax.Array | None = None,
        return_carry: bool | None = None,
        time_major: bool | None = None,
        reverse: bool | None = None,
        keep_order: bool | None = None,
        reset: jax.Array | None = None,
    ) -> Any:
        """Applies the cell to each step, as `flax.linen.RNN`, which describes the other arguments.

        Args:
          reset: [*batch, time], or [time, *batch] with `time_major`; bools, or numbers, as in `jaxgrad.gru`. Where it
            is true, `cell.initialize_carry` replaces the carry before that step, as at the first step of an episode.
            None for no resets.
        """
        check_cell(_NAME, self.cell, nn.GRUCell)
        self._check_axes()
        settings = given_or_own(
            self, time_major=time_major, reverse=reverse, keep_order=keep_order, return_carry=return_carry
        )
        inputs, initial_carry, seq_lengths, reset = as_arguments(
            _NAME,
            self.cell,
            inputs,
            initial_carry,
            seq_lengths,
            reset,
            H=self.cell.features,
            time_major=settings["time_major"],
        )
        step_shape = shape_of_step(inputs, settings["time_major"])

        def initialize_carry() -> jax.Array:
            return self.cell.initialize_carry(jax.random.key(0) if init_key is None else init_key, step_shape)

        carry = initialize_carry() if initial_carry is None else initial_carry
        if not self.cell.has_variable("params", "hn"):
            self.cell(carry, jnp.zeros(step_shape, inputs.dtype))  # creates the parameters
        weights = read_cell(nn.meta.unbox(self.cell.variables["params"]))
        leaves, structure = jax.tree.flatten(weights)
        inputs, *leaves = promote_dtype(inputs, *leaves, dtype=self.cell.dtype)
        return run_rnn(
            jax.tree.unflatten(structure, leaves),
            inputs,
            carry,
            reset=reset,
            reset_carry=None if starts_at_zero(self.cell, nn.GRUCell) else initialize_carry,
            seq_lengths=seq_lengths,
            **settings,
        )

    def _check_axes(self) -> None:
        per_step = any(in_filter(collection, "params") for collection in self.variable_axes)
        if per_step or not in_filter(self.variable_broadcast, "params"):
            raise ValueError(
                f"{_NAME}: variable_broadcast must contain 'params' and variable_axes must not, got "
                f"{self.variable_broadcast!r} and {dict(self.variable_axes)}; use flax's own RNN for such parameters"
            )
