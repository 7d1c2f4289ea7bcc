"""Process-wide settings: how kernels are chosen, how much memory they may take, whether results must repeat.

  >>> jaxgrad.config.update(search="exhaustive")
  >>> with jaxgrad.config.override(deterministic=True):
  ...     step = jax.jit(train_step).lower(*args).compile()

A setting counts when a call is traced: programs that are compiled already keep those they were traced with. So far they
govern cuDNN's kernels; oneDNN's are always chosen by its own rules and always deterministic.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

SEARCHES = ("heuristic", "exhaustive", "default")


@dataclasses.dataclass(frozen=True)
class Settings:
    """The settings in force.

    Attributes:
      search: how a kernel is chosen among those that cuDNN has for a shape. "heuristic": the first that works of those
        which cuDNN's own model ranks by speed. "exhaustive": the fastest of the first eight of them, timed once, while
        the call is traced; those that need more scratch memory than the operands and the result take together are left
        out. "default": the first that works of cuDNN's list of those that work in general.
      workspace_limit: the bytes of scratch memory that one call may take.
      deterministic: only kernels that give the same bits in every run. Times may differ from run to run, so that
        "exhaustive" is then the same as "heuristic".
    """

    search: str = "heuristic"
    workspace_limit: int = 1 << 30
    deterministic: bool = False

    def __post_init__(self) -> None:
        if self.search not in SEARCHES:
            raise ValueError(
                f"jaxgrad.config: search must be one of {', '.join(map(repr, SEARCHES))}, got {self.search!r}"
            )
        if not isinstance(self.workspace_limit, int) or isinstance(self.workspace_limit, bool):
            raise TypeError(
                f"jaxgrad.config: workspace_limit must be an int, bytes, got {type(self.workspace_limit).__name__}"
            )
        if self.workspace_limit < 0:
            raise ValueError(f"jaxgrad.config: workspace_limit must not be negative, got {self.workspace_limit}")
        if not isinstance(self.deterministic, bool):
            raise TypeError(f"jaxgrad.config: deterministic must be a bool, got {type(self.deterministic).__name__}")


_process = Settings()
_override: ContextVar[Settings | None] = ContextVar("jaxgrad_settings", default=None)


def current() -> Settings:
    """The settings in force here."""
    return _override.get() or _process


def update(**changes: Any) -> None:
    """Changes settings for the whole process.

    Args:
      **changes: attributes of `Settings`.

    Raises:
      TypeError: an unknown setting, or a value of the wrong type.
      ValueError: a value out of range.
    """
    global _process
    _process = _changed(_process, changes)


@contextlib.contextmanager
def override(**changes: Any) -> Iterator[Settings]:
    """Changes settings inside a `with` block, for the thread or task that runs it; errors as those of `update`."""
    token = _override.set(_changed(current(), changes))
    try:
        yield current()
    finally:
        _override.reset(token)


def _changed(settings: Settings, changes: dict[str, Any]) -> Settings:
    known = [field.name for field in dataclasses.fields(Settings)]
    for name in changes:
        if name not in known:
            raise TypeError(f"jaxgrad.config: {name} is none of the settings, {', '.join(known)}")
    return dataclasses.replace(settings, **changes)
