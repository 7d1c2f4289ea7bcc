"""Process-wide settings: how kernels are chosen, how much memory they may take, whether results must repeat.

  >>> jaxgrad.config.update(search="heuristic")
  >>> with jaxgrad.config.override(deterministic=True):
  ...     step = jax.jit(train_step).lower(*args).compile()

A setting counts when a call is traced: programs that are compiled already keep those they were traced with. So far they
govern cuDNN's kernels; oneDNN's are always chosen by its own rules and always deterministic.

Memory on a GPU. A kernel's scratch is part of its program: `compiled.memory_analysis()` counts it, and where a program
does not fit, with XLA's error RESOURCE_EXHAUSTED, a lower `workspace_limit` makes it smaller. What a program takes
follows from the GPU, cuDNN's version and the settings alone, never from the memory that happens to be free, so that all
hosts of a computation compile the same one. Beside JAX's memory cuDNN takes some tens of MiB for itself, and while it
times, the exhaustive search takes as much as the call's operands and workspace; where that is not free, it takes the
first kernel in place of the fastest. Where not even cuDNN's own is, a call with `implementation=None` runs on XLA and
warns, but raises where several processes compute together.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

SEARCHES = ("heuristic", "exhaustive", "default")


@dataclasses.dataclass(frozen=True)
class Settings:
    """The settings in force.

    Attributes:
      search: how a kernel is chosen among those that cuDNN has for a shape. "heuristic": the first that works of those
        which cuDNN's own model ranks by speed. "exhaustive": the fastest of the first eight of them, timed once in a
        process, while the call is traced, which took up to a second; those that need more scratch memory than the first
        of them, and than the operands and the result together, are left out. "default": the first that works of cuDNN's
        list of those that work in general. None: "exhaustive", and "heuristic" where several processes compute
        together, for each would time by itself, and two that compute the same could round differently.
      workspace_limit: the bytes of scratch memory that one call may take. None: 1 GiB, and less of it on a GPU of less
        than 16 GiB, a sixteenth of its memory or less.
      deterministic: only kernels that give the same bits in every run. Times may differ from run to run, so that
        "exhaustive" is then the same as "heuristic".
      plan_cache_dir: a directory in which the exhaustive search keeps what its timing came to, so that a machine times
        a call once and not in every process; None for none. It is of the whole process, may be shared by many, and is
        None at first unless the environment variable JAXGRAD_PLAN_CACHE_DIR names one. Only the choice of kernels
        depends on it: the programs are the same with and without. `jaxgrad.plan_cache_info` counts its use.
    """

    search: str | None = None
    workspace_limit: int | None = None
    deterministic: bool = False
    plan_cache_dir: str | None = None

    def __post_init__(self) -> None:
        if self.search is not None and self.search not in SEARCHES:
            searches = ", ".join(map(repr, SEARCHES))
            raise ValueError(f"jaxgrad.config: search must be one of {searches} or None, got {self.search!r}")
        limit = self.workspace_limit
        if limit is not None and (not isinstance(limit, int) or isinstance(limit, bool)):
            raise TypeError(
                f"jaxgrad.config: workspace_limit must be an int, bytes, or None, got {type(limit).__name__}"
            )
        if limit is not None and limit < 0:
            raise ValueError(f"jaxgrad.config: workspace_limit must not be negative, got {limit}")
        if not isinstance(self.deterministic, bool):
            raise TypeError(f"jaxgrad.config: deterministic must be a bool, got {type(self.deterministic).__name__}")
        if self.plan_cache_dir is not None:
            try:
                object.__setattr__(self, "plan_cache_dir", os.fsdecode(self.plan_cache_dir))
            except TypeError:
                given = type(self.plan_cache_dir).__name__
                raise TypeError(f"jaxgrad.config: plan_cache_dir must be a path or None, got {given}") from None


_process = Settings(plan_cache_dir=os.environ.get("JAXGRAD_PLAN_CACHE_DIR") or None)
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
    if "plan_cache_dir" in changes:
        from jaxgrad._ffi import use_plan_cache_dir  # which imports this module

        use_plan_cache_dir(_process.plan_cache_dir)


@contextlib.contextmanager
def override(**changes: Any) -> Iterator[Settings]:
    """Changes settings inside a `with` block, for the thread or task that runs it; errors as those of `update`.

    Raises:
      ValueError: plan_cache_dir, which is of the whole process.
    """
    if "plan_cache_dir" in changes:
        raise ValueError("jaxgrad.config: plan_cache_dir is of the whole process, jaxgrad.config.update sets it")
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
