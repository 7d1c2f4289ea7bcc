"""The settings in force: all but `plan_cache_dir` are part of JAX's trace context, and cause a new trace."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import threading
from typing import Any

import jax
import jax.extend.core

from jaxgrad._src.choice.measured_choices import MeasuredChoices, Recorder
from jaxgrad._src.core import checks
from jaxgrad._src.core.decorator import Decorator
from jaxgrad._src.core.jax_internals import cleared_lru_cache
from jaxgrad._src.core.warn import warn_caller
from jaxgrad._src.native import cuda

SEARCHES = ("heuristic", "exhaustive", "fallback")


@dataclasses.dataclass(frozen=True)
class Settings:
    """The settings of `jaxgrad.config`.

    Attributes:
      search: how cuDNN's engine is chosen for a convolution.
        "heuristic": the first engine that works, in the order of cuDNN's performance model.
        "exhaustive": the fastest of the first eight engines of that order. They are timed once per process and problem
        while the call is traced, which takes up to a second. Engines are not timed if their workspace is larger than 64
        MiB, larger than that of the first engine, and larger than the operands and the result together.
        "fallback": the first engine that works of cuDNN's list of engines that support most problems.
        None: "exhaustive" in a single process, "heuristic" in a multi-process program. Each process would time for
        itself, and two processes that compute the same value could round differently.
      workspace_limit: bytes of workspace that one call may use. None: 1 GiB, or a sixteenth of the GPU's memory
        (rounded down to a power of two) where that is less.
      deterministic: use only engines that return the same bits in every run. Times differ from run to run, so
        "exhaustive" then behaves as "heuristic".
      plan_cache_dir: a directory in which the exhaustive search keeps its choices, and jaxgrad its compiled CUDA
        kernels, so that a machine times a call and compiles a kernel once and not once per process. None: "jaxgrad" in
        the directory of JAX's persistent compilation cache, if there is one. An empty string: no directory. It applies
        to the whole process and may be shared by processes. The GPU runs the kernels in it: nobody else should be able
        to write there. The initial value comes from the environment variable JAXGRAD_PLAN_CACHE_DIR. Programs do not
        depend on it, only the choice of engines does. `jaxgrad.plan_cache_info` counts the choices that it had.
      tuning: a `jaxgrad.Tuning`, whose measured choices come before those of jaxgrad. None: no tuning.
    """

    search: str | None = None
    workspace_limit: int | None = None
    deterministic: bool = False
    plan_cache_dir: str | None = None
    tuning: MeasuredChoices | None = None

    def __post_init__(self) -> None:
        if self.search is not None and self.search not in SEARCHES:
            searches = ", ".join(map(repr, SEARCHES))
            raise ValueError(f"jaxgrad.config: search must be one of {searches} or None, got {self.search!r}")
        if (limit := self.workspace_limit) is not None:
            limit = checks.as_int("jaxgrad.config", "workspace_limit", limit, "an int (bytes) or None")
            if not 0 <= limit < 1 << 63:
                raise ValueError(f"jaxgrad.config: workspace_limit must lie in [0, 2^63), got {limit}")
            object.__setattr__(self, "workspace_limit", limit)
        deterministic = checks.check_flag("jaxgrad.config", "deterministic", self.deterministic)
        object.__setattr__(self, "deterministic", deterministic)
        if self.plan_cache_dir is not None:
            try:
                object.__setattr__(self, "plan_cache_dir", os.fsdecode(self.plan_cache_dir))
            except TypeError:
                given = type(self.plan_cache_dir).__name__
                raise TypeError(f"jaxgrad.config: plan_cache_dir must be a path or None, got {given}") from None
            try:
                self.plan_cache_dir.encode()
            except UnicodeEncodeError:
                given = repr(self.plan_cache_dir)
                raise ValueError(f"jaxgrad.config: plan_cache_dir must be valid UTF-8, got {given}") from None
            if "\0" in self.plan_cache_dir:
                given = repr(self.plan_cache_dir)
                raise ValueError(f"jaxgrad.config: plan_cache_dir must not contain a null character, got {given}")
        if self.tuning is not None and not isinstance(self.tuning, MeasuredChoices):
            raise TypeError(
                f"jaxgrad.config: tuning must be a jaxgrad.Tuning or None, got {type(self.tuning).__name__}"
            )

    def texts(self, platform: str) -> list[str]:
        """The settings that matter on a platform and differ from the defaults, as the texts of calls in a tuning have
        them: those of cuDNN."""
        if platform != "cuda":
            return []
        found = ["deterministic"] * self.deterministic
        found += [] if self.search is None else [f"search={self.search}"]
        return found + ([] if self.workspace_limit is None else [f"workspace_limit={self.workspace_limit}"])


_process = Settings(plan_cache_dir=os.environ.get("JAXGRAD_PLAN_CACHE_DIR"))
_process_lock = threading.Lock()


def _traced(settings: Settings) -> Settings:
    """The settings that programs depend on."""
    return dataclasses.replace(settings, plan_cache_dir=None)


# Parts of the cache keys of jax.jit: a function is traced again where they change. They are made when jaxgrad is
# imported, because each new one changes the keys of all programs.
_context = jax.make_user_context(_traced(_process))
forward_mode_enabled = jax.make_user_context(False)  # set by `jaxgrad.forward_mode`


def use_plan_directory() -> None:
    """Tells the CUDA module the directory in force. To be called before plans and kernels are made.

    It is called here too: an exported program may run in a process that lowers no call.
    """
    directory, of_jax = _process.plan_cache_dir, jax.config.jax_compilation_cache_dir  # type: ignore[attr-defined]
    if directory is None and of_jax and "://" not in of_jax:  # JAX's may be in a cloud storage
        directory = os.path.join(of_jax, "jaxgrad")
    cuda.use_plan_directory(directory or "")


use_plan_directory()


def current() -> Settings:
    """Returns the settings in force in this thread."""
    return dataclasses.replace(_context.value, plan_cache_dir=_process.plan_cache_dir)


def of_kernels() -> Settings:
    """Returns the settings in force that a kernel depends on, which leaves out the tuning."""
    of_thread = _context.value
    return _of_kernels(of_thread.search, of_thread.workspace_limit, of_thread.deterministic, _process.plan_cache_dir)


_of_kernels = cleared_lru_cache(64)(Settings)  # kept: calls outside `jax.jit` ask each time


def update(**changes: Any) -> None:
    """Changes settings for the whole process.

    Functions under `jax.jit` that were traced before are traced again at their next call.

    Args:
      **changes: attributes of `Settings`.

    Raises:
      TypeError: a setting is unknown, or a value has the wrong type.
      ValueError: a value is out of range.

    Examples:
      >>> jaxgrad.config.update(search="heuristic", workspace_limit=1 << 28)
    """
    global _process
    with _process_lock:
        _process = _changed(_process, changes)
        _context.set_global(_traced(_process))
        if "plan_cache_dir" in changes:
            use_plan_directory()


def override(**changes: Any) -> Override:
    """Changes settings inside a `with` block, or in the calls of a decorated function, for the thread that enters it.

    Functions under `jax.jit` that were traced outside the block are traced again inside it. All settings of the block,
    or of the calls of a decorated function, are fixed when `override` is called: a later `update` takes effect outside
    of them only. An override without `tuning` does not change which tuning is in force.

    Args:
      **changes: attributes of `Settings` except `plan_cache_dir`.

    Returns:
      A context manager whose value is the settings in force inside the block. It is a decorator too, and may be entered
      again.

    Raises:
      TypeError: a setting is unknown, or a value has the wrong type.
      ValueError: a value is out of range, or `plan_cache_dir`, which applies to the whole process.

    Examples:
      >>> with jaxgrad.config.override(deterministic=True):
      ...     loss, gradients = step(params, batch)
    """
    if "plan_cache_dir" in changes:
        raise ValueError(
            "jaxgrad.config: plan_cache_dir applies to the whole process; set it with jaxgrad.config.update"
        )
    has_tuning = "tuning" in changes
    settings = _changed(current(), changes)
    return Override(settings if has_tuning else dataclasses.replace(settings, tuning=None), has_tuning)


class Override(Decorator):
    """The context manager of `override`."""

    name = "jaxgrad.config.override"

    def __init__(self, settings: Settings, has_tuning: bool) -> None:
        super().__init__()
        self._settings = settings
        self._has_tuning = has_tuning

    def __reduce__(self) -> tuple[Any, ...]:
        return Override, (self._settings, self._has_tuning)

    def __enter__(self) -> Settings:
        super().__enter__()
        return current()

    def _new_context(self) -> contextlib.AbstractContextManager[Any]:
        outer, own = current().tuning, self._settings.tuning
        # While `jaxgrad.tune` traces a function, it records the calls under another tuning too.
        records = isinstance(outer, Recorder) and own is not None and not isinstance(own, Recorder)
        keeps = records or not self._has_tuning
        return _context(_traced(dataclasses.replace(self._settings, tuning=outer if keeps else own)))


def _changed(settings: Settings, changes: dict[str, Any]) -> Settings:
    names = [field.name for field in dataclasses.fields(Settings)]
    for name in changes:
        if name not in names:
            raise TypeError(f"jaxgrad.config: unknown setting {name!r}; the settings are {', '.join(names)}")
    if changes.get("search") == "default":
        warn_caller('jaxgrad.config: search="default" is now called search="fallback"', DeprecationWarning)
        changes = {**changes, "search": "fallback"}
    return dataclasses.replace(settings, **changes)
