"""The static arguments of a GRU call, and its description for the backends."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax

from jaxgrad._src.choice.candidates import Candidates
from jaxgrad._src.core.precision import precision_flags
from jaxgrad._src.native.ffi import short_dtype


@dataclasses.dataclass(frozen=True)
class GruParams:
    """The static arguments of one call.

    Attributes:
      direction: "forward", "reverse" or "bidirectional".
      linear_before_reset: as in `jaxgrad.gru`.
      clip: the bound on the input of each activation; None for no bound.
      precision: JAX's default precision where the op was called, and not None. It holds for the gradients too.
      has_lengths, has_resets, has_reset_h: whether there are `sequence_lens`, `reset` and `reset_h`, without which
        kernels are faster.
      batch_major: whether the caller's x and y have the batch first. The passes always take time-major arrays. The CPU
        backend transposes x and y back to the caller's order, and XLA removes the two transposes.
      forward_candidates: what may run the forward pass.
      backward_candidates: what may run the backward pass.
    """

    direction: str
    linear_before_reset: bool
    clip: float | None
    precision: Any
    has_lengths: bool
    has_resets: bool
    has_reset_h: bool
    batch_major: bool
    forward_candidates: Candidates
    backward_candidates: Candidates

    @property
    def num_gates(self) -> int:
        """The number of [H] vectors that the forward pass saves for each step, row and direction."""
        return 4 if self.linear_before_reset else 3

    def problem(self, x: jax.Array, r: jax.Array) -> GruProblem:
        """The problem of operands x and r, which may have a first axis of groups or, x alone, of examples."""
        names = "linear_before_reset", "clip", "precision", "has_lengths", "has_resets", "has_reset_h"
        return GruProblem.of(x, r, **{name: getattr(self, name) for name in names})


@dataclasses.dataclass(frozen=True)
class GruProblem:
    """A GRU call as the backends are asked about it.

    Attributes:
      T, B, I, H, D: the numbers of steps, rows, inputs, hidden units and directions.
      groups: the number of GRUs with their own weights that one call computes: `vmap` over weights makes more than one.
      dtype: the dtype of every floating-point operand.
      linear_before_reset, clip, precision, has_lengths, has_resets, has_reset_h: as in `GruParams`.
    """

    T: int
    B: int
    I: int  # noqa: E741
    H: int
    D: int
    dtype: Any
    linear_before_reset: bool
    clip: float | None
    precision: Any
    has_lengths: bool = False
    has_resets: bool = False
    has_reset_h: bool = False
    groups: int = 1

    def text(self, pass_name: str, platform: str) -> str:
        """The text of a call in a tuning, with its gradients."""
        flags = {"linear_before_reset": self.linear_before_reset, "clip": self.clip is not None}
        flags |= {"sequence_lens": self.has_lengths, "reset": self.has_resets, "reset_h": self.has_reset_h}
        sizes = f"T={self.T} B={self.B} I={self.I} H={self.H} D={self.D}"
        sizes += f" groups={self.groups}" if self.groups > 1 else ""
        words = [*(name for name, is_set in flags.items() if is_set), *precision_flags(self.dtype, self.precision)]
        return " ".join(["gru", short_dtype(self.dtype), sizes, *words])

    @classmethod
    def of(cls, x: jax.Array, r: jax.Array, **options: Any) -> GruProblem:
        """The problem of operands x [T, B, I] and r [D, 3H, H], which may have a first axis of groups.

        `options` are those that `GruParams` has too.
        If x alone has a first axis, of examples, the kernels may compute them as rows of one batch.
        """
        (*groups, T, B, I), (*own_weights, D, _, H) = x.shape, r.shape  # noqa: E741
        rows = B if own_weights else math.prod(groups) * B
        return cls(T, rows, I, H, D, x.dtype, groups=math.prod(own_weights), **options)
