"""`jaxgrad.nn.nnx.RNN`: flax nnx's `RNN` of a `GRUCell`, on `jaxgrad.gru`."""

from __future__ import annotations

from typing import Any

import jax
from flax import nnx

from jaxgrad._src.convert.flax_gru import read_cell
from jaxgrad._src.convert.flax_layers import check_linear
from jaxgrad._src.nn.rnn import as_arguments, check_cell, given_or_own, run_rnn, shape_of_step, starts_at_zero

_NAME = "jaxgrad.nn.nnx.RNN"


class RNN(nnx.RNN):
    """`flax.nnx.RNN` of a `flax.nnx.GRUCell`, with `jaxgrad.gru` in place of a scan over the cell.

    Constructor, state and results are those of `flax.nnx.RNN`: checkpoints fit both ways. `flax.nnx.Bidirectional`
    takes it as it is. A step of a rollout calls the cell itself. `unroll` and `broadcast_rngs` have no effect.

    The policy of the cell applies: products are computed in its `dtype`, after its `promote_dtype`, and the carry and
    the outputs have the dtype of the initial carry, by default `param_dtype`. With a 16-bit `dtype` the carry between
    the steps is float32, and is rounded to `dtype` where it is returned.

    Raises:
      TypeError: the cell is not a `GRUCell`.
      ValueError: the cell has other functions than sigmoid and tanh or other layers than `nnx.Linear`, or the
        parameters differ from step to step.

    Examples:
      >>> import flax.nnx
      >>> from jaxgrad.nn import nnx
      >>> rnn = nnx.RNN(flax.nnx.GRUCell(32, 64, rngs=flax.nnx.Rngs(0)))
      >>> rnn(jnp.ones((10, 50, 32))).shape
      (10, 50, 64)
    """

    @jax.named_scope(_NAME)
    def __call__(
        self,
        inputs: jax.Array,
        *,
        initial_carry: jax.Array | None = None,
        seq_lengths: jax.Array | None = None,
        return_carry: bool | None = None,
        time_major: bool | None = None,
        reverse: bool | None = None,
        keep_order: bool | None = None,
        rngs: nnx.Rngs | nnx.RngStream | None = None,
        reset: jax.Array | None = None,
    ) -> Any:
        """Applies the cell to each step, as `flax.nnx.RNN`, which describes the other arguments.

        Args:
          reset: [*batch, time], or [time, *batch] with `time_major`; bools, or numbers, as in `jaxgrad.gru`. Where it
            is true, `cell.initialize_carry` replaces the carry before that step, as at the first step of an episode.
            None for no resets.
        """
        self._check()
        cell: Any = self.cell
        settings = given_or_own(
            self, time_major=time_major, reverse=reverse, keep_order=keep_order, return_carry=return_carry
        )
        inputs, initial_carry, seq_lengths, reset = as_arguments(
            _NAME,
            cell,
            inputs,
            initial_carry,
            seq_lengths,
            reset,
            H=cell.hidden_features,
            time_major=settings["time_major"],
        )
        step_shape = shape_of_step(inputs, settings["time_major"])
        if rngs is None:
            rngs = self.rngs
        if isinstance(rngs, nnx.Rngs):
            rngs = rngs.carry.fork()

        def initialize_carry() -> jax.Array:
            return cell.initialize_carry(step_shape, rngs)

        carry = initialize_carry() if initial_carry is None else initial_carry
        leaves, structure = jax.tree.flatten(read_cell(cell))
        inputs, *leaves = cell.promote_dtype((inputs, *leaves), dtype=cell.dtype)
        return run_rnn(
            jax.tree.unflatten(structure, leaves),
            inputs,
            carry,
            reset=reset,
            reset_carry=None if starts_at_zero(cell, nnx.GRUCell) else initialize_carry,
            seq_lengths=seq_lengths,
            **settings,
        )

    def _check(self) -> None:
        check_cell(_NAME, self.cell, nnx.GRUCell)
        check_linear(_NAME, self.cell, "; use flax's own RNN")
        if any(isinstance(axis, int) for axis in self.state_axes.values()):
            raise ValueError(
                f"{_NAME}: state_axes must not split the state over the steps, got {dict(self.state_axes)}; "
                "use flax's own RNN"
            )
