"""The features of a GRU call that the tables of preferences know."""

from __future__ import annotations

from typing import NamedTuple

from jaxgrad._src.gru.params import GruProblem


class GruFeatures(NamedTuple):
    """The features of a call.

    Attributes:
      steps, rows, hidden: sizes.
      bits: of an element.
      linear_before_reset: as in `jaxgrad.gru`.
    """

    steps: int
    rows: int
    hidden: int
    bits: int
    linear_before_reset: bool

    @classmethod
    def of(cls, call: GruProblem) -> GruFeatures:
        return cls(call.T, call.B, call.H, 8 * call.dtype.itemsize, call.linear_before_reset)
