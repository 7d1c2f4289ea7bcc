"""The options of one measurement, from the command line."""

from __future__ import annotations

import dataclasses

from benchmarks.contender_names import OURS


@dataclasses.dataclass(frozen=True)
class Effort:
    """How long to measure: at least `rounds` rounds, and more until `seconds` have passed."""

    rounds: int
    seconds: float


@dataclasses.dataclass(frozen=True)
class Options:
    """
    Attributes:
      effort: how long to measure each row.
      contenders: the names to measure beside jaxgrad; None for all.
      compile_seconds: the time limit of torch.compile for one contender.
    """

    effort: Effort
    contenders: frozenset[str] | None = None
    compile_seconds: float = 180

    def wants(self, name: str) -> bool:
        return self.contenders is None or name == OURS or name in self.contenders
