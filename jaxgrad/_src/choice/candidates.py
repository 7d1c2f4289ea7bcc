"""The implementations that may run one pass of a call: what the selection hands to the passes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from jaxgrad._src.choice.measured_choices import MeasuredChoices, RecordedCall
from jaxgrad._src.choice.op import platform_of, public_platform


@dataclasses.dataclass(frozen=True)
class Forced:
    """An implementation that a call forces with `implementation=`."""

    op: str
    implementation: str

    def lowered_for(self, platform: str) -> None:
        """Raises ValueError where a program is lowered for, or run on, another platform than the implementation's."""
        own, given = public_platform(platform_of(self.implementation)), public_platform(platform)
        if given != own:
            raise ValueError(
                f"jaxgrad.{self.op}: implementation={self.implementation!r} runs on the platform {own!r} only, "
                f"got {given!r}"
            )


@dataclasses.dataclass(frozen=True)
class Candidates:
    """The implementations that may run one pass of a call, known while the call is traced.

    Attributes:
      implementations: at most one of them runs: the first one whose platform is the program's. If there is none, XLA
        runs the pass.
      forced: what the call forces, if anything. `implementations` then holds only that one.
      tuning: the tuning in force, which may choose again for a pass whose sizes `vmap` or a mesh has changed.
      recorded: the call, if the tuning records it.
      call: the description of a call that they were selected for. Passes are kept by equal candidates, so that other
        calls of a pass may have other sizes.
      even_if_slower: whether they run a pass that they support where the table prefers XLA for the sizes that `vmap` or
        a mesh has made.
      platform: the platform of the program, where it is known while the call is traced.
    """

    implementations: tuple[str, ...] = ()
    forced: Forced | None = None
    tuning: MeasuredChoices | None = None
    recorded: RecordedCall | None = None
    even_if_slower: bool = False
    platform: str | None = None
    call: Any = dataclasses.field(default=None, compare=False, repr=False)

    @property
    def lowering_hook(self) -> Forced | RecordedCall | None:
        """The object whose method `lowered_for` is called when a program with the call is lowered, or None."""
        return self.forced or self.recorded

    def for_whole_arrays(self) -> Candidates:
        """The candidates for a call on whole arrays. Over a mesh the calls on its shards run, and are recorded."""
        return dataclasses.replace(self, recorded=None)

    def without(self, implementation: str) -> Candidates:
        """The candidates less one that does not support the problem after all. A forced one stays."""
        if self.forced:
            return self
        left = tuple(name for name in self.implementations if name != implementation)
        return dataclasses.replace(self, implementations=left)

    def with_choice(self, chosen: str, here: Sequence[str]) -> Candidates:
        """The candidates after a choice among the implementations of one platform, `here`, and XLA."""
        others = tuple(name for name in self.implementations if name not in here)
        return dataclasses.replace(self, implementations=others + (chosen,) * (chosen in here))

    def on_xla(self) -> Candidates:
        """No candidate. A forced implementation still restricts the platform."""
        return dataclasses.replace(self, implementations=())


XLA = Candidates()
