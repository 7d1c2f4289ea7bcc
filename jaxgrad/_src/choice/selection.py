"""Selects, for each pass of a call, the backends that may run it."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
import threading
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import jax

from jaxgrad._src.choice.candidates import XLA, Candidates, Forced
from jaxgrad._src.choice.measured_choices import Call, Choice, MeasuredChoices, RecordedCall, Recorder
from jaxgrad._src.choice.old_names import current_name, warn_of_old_name
from jaxgrad._src.choice.op import Backend, Op, Rejection, lowering_platform, public_platform
from jaxgrad._src.choice.settings import current
from jaxgrad._src.core.warn import warn_caller

_logger = logging.getLogger("jaxgrad")


_Rejections = Mapping[tuple[str, str], Rejection | None]  # by implementation and pass


def reject_symbolic_shapes(*arrays: jax.Array | None) -> Rejection | None:
    """Rejects shapes with symbolic dimensions, as in shape-polymorphic export: no workspace can be planned for them."""
    symbolic = any(not isinstance(size, int) for array in arrays if array is not None for size in array.shape)
    return Rejection("symbolic shapes run on XLA") if symbolic else None


def supporting(candidates: Candidates, backends: Sequence[Backend], pass_name: str, call: Any) -> Candidates:
    """Returns the candidates that run a pass whose sizes `vmap` or a mesh may have changed to those of `call`.

    A pass that a kernel runs moves to another kernel of the platform, or to XLA, where a row for such calls prefers it.
    A pass that XLA runs stays there, unless a tuning has measured the call.
    """
    if call == candidates.call and not isinstance(candidates.tuning, Recorder):
        return candidates
    for platform, here in _by_platform(backends).items() if candidates.forced is None else ():
        choice = _tuned(candidates.tuning, backends, platform, pass_name, call).choice
        names = [backend.implementation for backend in here]
        if choice is not None:
            candidates = candidates.with_choice(choice.implementation, names)
        running = [name for name in candidates.implementations if name in names]  # none for symbolic shapes
        follows_rows = choice is None and not candidates.even_if_slower
        for backend in here if running else ():
            row = backend.row(pass_name, call, resized=True) if follows_rows else None
            preferred = [row.prefer] if row is not None else running
            if backend.implementation in preferred and backend.supports_resized(pass_name, call):
                candidates = candidates.with_choice(backend.implementation, names)
                break
        else:
            candidates = candidates.with_choice("xla", names)
    if isinstance(candidates.tuning, Recorder):
        recorded = RecordedCall(candidates.tuning, pass_name, call, candidates.implementations)
        return dataclasses.replace(candidates, recorded=recorded)
    return candidates


def _by_platform(backends: Sequence[Backend]) -> dict[str, list[Backend]]:
    found: dict[str, list[Backend]] = {}
    for backend in backends:
        found.setdefault(backend.platform, []).append(backend)
    return found


@dataclasses.dataclass(frozen=True)
class _Tuned:
    """The choice of a tuning for a pass; None if it has none, or `why_ignored` says why it cannot be followed."""

    choice: Choice | None = None
    why_ignored: str = ""


def _tuned(
    tuning: MeasuredChoices | None, backends: Sequence[Backend], platform: str, pass_name: str, call: Any
) -> _Tuned:
    """The choice of a tuning for a pass. It may name an implementation that cannot run the pass, as one in a file that
    somebody has edited."""
    choice = None if tuning is None or call is None else tuning.choice(platform, pass_name, call)
    if choice is None or choice.implementation == "xla":
        return _Tuned(choice)
    chosen = f"the tuning chooses {choice.implementation!r}, which "
    for backend in backends:
        if (backend.implementation, backend.platform) == (choice.implementation, platform):
            rejection = backend.reject(pass_name, call, forced=True)
            return _Tuned(why_ignored=f"{chosen}cannot run: {rejection.reason}") if rejection else _Tuned(choice)
    return _Tuned(why_ignored=f"{chosen}has no kernel for this pass on the platform {public_platform(platform)!r}")


@dataclasses.dataclass(frozen=True)
class Selection:
    """The outcome of the selection for one call."""

    op: Op
    implementation: str | None  # the forced one, without which the call fails; None if the fastest one runs
    rejections: _Rejections
    call: Any = None  # the op's description of the call
    tuning: MeasuredChoices | None = None  # None if the tuning in force has no choice for calls of the op
    passes: Sequence[str] = ()  # those that were asked about
    platform: str | None = None  # the only one that was asked about; None for all

    @property
    def candidates(self) -> dict[str, Candidates]:
        """The candidates by pass."""
        return {pass_name: self._candidates(pass_name) for pass_name in self.passes}

    def choice(self, backend: Backend, pass_name: str) -> Choice | None:
        """The choice of the tuning in force that is followed for a pass on a backend's platform, if there is one."""
        return self._tuned(backend.platform, pass_name).choice

    def ignored_choice(self, pass_name: str, platform: str) -> str:
        """Why the choice of the tuning in force for a pass is not followed; empty if it is, or if there is none."""
        return self._tuned(platform, pass_name).why_ignored

    def _tuned(self, platform: str, pass_name: str) -> _Tuned:
        return _tuned(self.tuning, self.op.backends, platform, pass_name, self.call)

    def reason(self, backend: Backend, pass_name: str) -> str:
        """Why a backend that is not rejected runs a pass."""
        choice = self.choice(backend, pass_name)
        return choice.reason if choice else backend.description

    def _candidates(self, pass_name: str) -> Candidates:
        if self.implementation == "xla":
            return XLA
        if self.implementation is not None:
            return Candidates((self.implementation,), Forced(self.op.name, self.implementation), call=self.call)
        names = (backend.implementation for backend in self.op.backends)
        left = tuple(name for name in names if self.rejections.get((name, pass_name)) is None)
        return Candidates(left, tuning=self.tuning, call=self.call)


def select(
    op: Op,
    implementation: str | None,
    call: Any = None,
    rejection: Rejection | None = None,
    known: _Rejections | None = None,
    *,
    passes: Sequence[str] | None = None,
    platform: str | None = None,
) -> Selection:
    """Asks the backends of an op about a call.

    Args:
      op: the op.
      implementation: the argument `implementation=` of the call.
      call: the op's description of the call, as its backends read it.
      rejection: why no backend can run the call, if it is known.
      known: rejections that were computed before, for instance for an equal call.
      passes: the passes to ask about; None for all.
      platform: the platform that the program is lowered for, if the call is selected for it alone, without a tuning.
        XLA then runs what `implementation` cannot.

    Raises:
      ValueError: the forced implementation cannot run the call, or the op does not have it.
      RuntimeError: a library of the forced implementation is missing.
    """
    given, passes = implementation, passes or op.passes
    if platform is None:
        implementation = current_name(op, given, call)
    may_be_tuned = implementation is None and rejection is None and platform is None
    tuning = _tuning_for(op, call) if may_be_tuned else None
    found = dict(known or {}) if tuning is None else {}
    for backend, pass_name in itertools.product(op.backends, passes):
        key, asked = (backend.implementation, pass_name), implementation in (None, backend.implementation)
        if platform not in (None, backend.platform):
            found[key] = Rejection(f"the {backend.title} do not run on the platform {public_platform(platform)!r}")
        elif not asked and platform is not None:
            found[key] = Rejection(f"only the implementation {implementation!r} may run here", is_asked=False)
        elif asked and key not in found:
            found[key] = rejection or _rejection(
                op, backend, pass_name, call, found, implementation is not None, tuning
            )
    if implementation not in (None, "xla") and platform is None:
        _check_forced(op, given, implementation, found)
        warn_of_old_name(given, implementation)
    forced = implementation if platform is None else None
    selection = Selection(op, forced, found, call, tuning, passes, platform)
    _record(selection)
    return selection


def _tuning_for(op: Op, call: Any) -> MeasuredChoices | None:
    """The tuning in force, if it may choose for calls of an op."""
    tuning = current().tuning
    if tuning is None or not isinstance(call, Call):
        return None
    return tuning if tuning.covers(call, op.passes[0]) else None


def _rejection(
    op: Op,
    backend: Backend,
    pass_name: str,
    call: Any,
    found: _Rejections,
    forced: bool,
    tuning: MeasuredChoices | None = None,
) -> Rejection | None:
    """Returns why a backend does not run a pass, given the rejections of the backends before it."""
    if (choice := _tuned(tuning, op.backends, backend.platform, pass_name, call).choice) is None:
        return taken(op.backends, backend, pass_name, found) or backend.reject(pass_name, call, forced=forced)
    if choice.implementation == backend.implementation:
        return None
    return backend.supports(pass_name, call) or Rejection(choice.reason, slower=True)


def measurable_implementations(op: Op, call: Any, platform: str) -> list[str]:
    """The implementations that can run all passes of a call on a platform, with "xla" as the last."""
    found = [
        backend.implementation
        for backend in op.backends
        if backend.platform == platform and not any(backend.reject(name, call, forced=True) for name in op.passes)
    ]
    return [*found, "xla"]


def select_typical(op: Op, implementation: str | None) -> Selection:
    """The selection for a typical call of an op."""
    known = {(b.implementation, name): _typical_rejection(op, b, name) for b in op.backends for name in op.passes}
    with recording():
        return select(op, implementation, known=known)


def _typical_rejection(op: Op, backend: Backend, pass_name: str) -> Rejection | None:
    rejection = backend.typical_rejection(op.name, pass_name)
    return rejection if rejection and not rejection.slower else backend.missing() or rejection


def taken(backends: Sequence[Backend], backend: Backend, pass_name: str, found: _Rejections) -> Rejection | None:
    """Rejects a pass that an earlier backend of the same platform takes: this one need not be asked for a plan."""
    for earlier in backends:
        if earlier is backend:
            return None
        key = (earlier.implementation, pass_name)
        if earlier.platform == backend.platform and key in found and found[key] is None:
            return Rejection(f"the {earlier.title} are faster", slower=True)
    return None


def _check_forced(op: Op, given: str | None, implementation: str, rejections: _Rejections) -> None:
    cannot = f"jaxgrad.{op.name}: implementation={given!r} cannot run:"
    backend = op.backend(implementation)
    if backend is None:
        names = ", ".join(repr(name) for name in (*(b.implementation for b in op.backends), "xla"))
        raise ValueError(f"{cannot} the implementations of this op are {names}")
    for pass_name in op.passes:
        rejection = rejections.get((implementation, pass_name))
        if rejection is not None and not rejection.slower:
            raise (RuntimeError if rejection.missing else ValueError)(f"{cannot} {rejection.reason}")


_recorder = threading.local()


@contextlib.contextmanager
def recording() -> Iterator[list[Selection]]:
    """Collects the selections of this thread in a list, instead of warning of missing libraries."""
    outer = getattr(_recorder, "selections", None)
    _recorder.selections = []
    try:
        yield _recorder.selections
    finally:
        _recorder.selections = outer


def _record(selection: Selection) -> None:
    if (recorded := getattr(_recorder, "selections", None)) is not None:
        recorded.append(selection)
        return
    if _logger.isEnabledFor(logging.DEBUG):
        _log(selection)
    if selection.implementation is None:
        warned = set()
        for backend in selection.op.backends:
            rejections = (selection.rejections.get((backend.implementation, name)) for name in selection.passes)
            missing = next((r.missing for r in rejections if r is not None and r.missing), "")
            if missing and missing not in warned and jax.default_backend() == public_platform(backend.platform):
                warned.add(missing)
                _warn_once(backend.instead, backend.title, missing)


def _log(selection: Selection) -> None:
    """Logs a line for each pass: the implementation on each platform, and why the platform's others do not run it."""
    for pass_name, candidates in selection.candidates.items():
        parts = []
        for platform, backends in _by_platform(selection.op.backends).items():
            if selection.platform not in (None, platform):
                continue
            names = [backend.implementation for backend in backends]
            chosen = next((name for name in candidates.implementations if name in names), "xla")
            rejections = {name: selection.rejections.get((name, pass_name)) for name in names}
            reasons = [f"{name}: {rejection.reason}" for name, rejection in rejections.items() if rejection]
            parts.append(f"{chosen} on {public_platform(platform)}" + (f" ({'; '.join(reasons)})" if reasons else ""))
        here = lowering_platform(jax.default_backend())
        call = f" [{selection.call.text(pass_name, here)}]" if isinstance(selection.call, Call) else ""
        _logger.debug("%s, %s%s: %s", selection.op.name, pass_name, call, ", ".join(parts))


@cache
def _warn_once(instead: str, title: str, missing: str) -> None:
    warn_caller(
        f"jaxgrad runs on {instead} because the {title} are missing: {missing}. "
        "`python -m jaxgrad` prints what is installed.",
        RuntimeWarning,
    )
