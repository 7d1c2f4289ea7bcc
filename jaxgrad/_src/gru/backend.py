"""The interface of the GRU's backends.

All implementations save the same residuals, so that any backward pass can follow any forward pass:

  y      [T, D, B, H]      the hidden states, zero past the length of a row
  gates  [T, D, B, 3H]     z, r, n after their activations; with `linear_before_reset` [T, D, B, 4H]: also h Rn' + Rbn

A pre-activation that `clip` bounded is saved as +2 or -2, which no gate can be: the gate is the activation of +clip or
-clip, and its gradient is zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from jaxgrad._src.choice.op import Backend, Rejection
from jaxgrad._src.choice.table import Row, preference
from jaxgrad._src.gru.features import GruFeatures
from jaxgrad._src.gru.params import GruParams, GruProblem

PASSES = ("forward", "backward")

# The operands of the forward pass, in order.
OPERANDS = ("x", "w", "r", "b", "sequence_lens", "initial_h", "reset", "reset_h")


class Gradients(NamedTuple):
    """The gradients of the inputs; None where a gradient is not needed."""

    x: jax.Array | None
    w: jax.Array | None
    r: jax.Array | None
    b: jax.Array | None
    initial_h: jax.Array | None
    reset_h: jax.Array | None

    @classmethod
    def fields_of(cls, values: Sequence[Any]) -> tuple[Any, ...]:
        """Returns those of `values`, one for each operand, that belong to an operand with a gradient."""
        return tuple(value for name, value in zip(OPERANDS, values, strict=True) if name in cls._fields)

    def of_operands(self) -> tuple[jax.Array | None, ...]:
        """Returns a gradient for each operand; sequence_lens and reset have None."""
        return tuple(getattr(self, name, None) for name in OPERANDS)


class GruBackend(Backend):
    """Kernels of the GRU. `GruParams` has the static arguments.

    The arrays have the shapes of `jaxgrad.gru` and a first axis of groups, which have their own weights. In the
    backward pass, the first axis of w and r has the size 1 where the groups share them: groups are then the examples of
    per-example gradients.
    """

    def reject(self, pass_name: str, call: GruProblem, *, forced: bool) -> Rejection | None:
        # Without steps or rows there is no kernel call.
        return super().reject(pass_name, call, forced=forced) if min(call.T, call.B) else self.missing()

    def row(self, pass_name: str, call: GruProblem, *, resized: bool = False) -> Row | None:
        if not min(call.T, call.B):
            return None
        return preference("gru", pass_name, self.platform, GruFeatures.of(call), (self.implementation, "xla"))

    def forward(
        self,
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
        raise NotImplementedError

    def backward(
        self,
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
        """Returns the gradients of (x, w, r, b, initial_h, reset_h) that are needed.

        A cotangent that is None is zero.
        """
        raise NotImplementedError
