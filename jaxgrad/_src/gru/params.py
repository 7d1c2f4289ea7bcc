"""The static arguments of a GRU call."""

from __future__ import annotations

import dataclasses

from jaxgrad._src.core.selection import Candidates


@dataclasses.dataclass(frozen=True)
class GruParams:
    """The static arguments of one call.

    Attributes:
      direction: "forward", "reverse" or "bidirectional".
      linear_before_reset: as in `jaxgrad.gru`.
      clip: the bound on the input of each activation; None for no bound.
      forward_candidates: what may run the forward pass.
      backward_candidates: what may run the backward pass.
    """

    direction: str
    linear_before_reset: bool
    clip: float | None
    forward_candidates: Candidates
    backward_candidates: Candidates

    @property
    def num_gates(self) -> int:
        """The number of [H] vectors that the forward pass saves for each step, row and direction."""
        return 4 if self.linear_before_reset else 3
