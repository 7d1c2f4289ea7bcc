"""Choices between implementations by measured time, as the selection looks them up."""

from __future__ import annotations

import dataclasses
import hashlib
import math
import uuid
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol, runtime_checkable

from jaxgrad._src.choice.environment import Environment, program_environment
from jaxgrad._src.core.warn import warn_caller


@dataclasses.dataclass(frozen=True)
class Choice:
    """The outcome of measuring one call.

    Attributes:
      implementation: the chosen implementation, as in `jaxgrad.Explanation`: the fastest, or the default where no other
        one is clearly faster. For an accelerated convolution also the pass that it is read as: "forward on cudnn",
        "weight_gradient on cudnn", "forward on xla" for a matrix product. "xla" is the convolution as written, on XLA.
      default: what jaxgrad selects without a tuning.
      times_us: microseconds of one call, the median, by implementation.
      date: when it was measured, as in ISO 8601. Choices that differ in it alone are equal.
    """

    implementation: str
    default: str
    times_us: Mapping[str, float]
    date: str = dataclasses.field(default="", repr=False, compare=False)

    def __post_init__(self) -> None:
        for name in (self.implementation, self.default):
            if name not in self.times_us:
                raise ValueError(f"there is no time of {name!r}")
        for name, us in self.times_us.items():
            if not 0 < us < math.inf:
                raise ValueError(f"the time of {name!r} must be positive and finite, got {us!r}")

    @property
    def gain(self) -> float:
        """The time of the default over that of the chosen implementation."""
        return self.times_us[self.default] / self.times_us[self.implementation]

    @property
    def times(self) -> str:
        return ", ".join(f"{name} {us:.4g}" for name, us in self.times_us.items())

    @property
    def reason(self) -> str:
        """Why the implementation is selected, in one sentence."""
        return f"chosen by jaxgrad.tune, which measured, in microseconds: {self.times}"


@runtime_checkable
class Call(Protocol):
    """A call of an op, as its backends are asked about it. Ops whose calls have no text are not tuned."""

    def text(self, pass_name: str, platform: str) -> str:
        """All that the times of a pass on a platform depend on: shapes, dtypes and parameters. Passes that are measured
        together share it."""
        ...


class MeasuredChoices:
    """Choices by machine and call. `jaxgrad.Tuning` is the public form.

    Two of them are equal if they choose the same implementations, whatever the times.
    """

    def __init__(self, machines: Mapping[Environment, Mapping[str, Choice]]) -> None:
        if not isinstance(machines, Mapping):
            raise TypeError(f"jaxgrad.Tuning: machines must be a mapping, got {type(machines).__name__}")
        copied = {machine: MappingProxyType(dict(choices)) for machine, choices in machines.items()}
        self.machines: Mapping[Environment, Mapping[str, Choice]] = MappingProxyType(copied)
        # Programs depend on it, and the times, which differ from run to run, change no program.
        chosen = {repr(m): sorted((t, c.implementation) for t, c in choices.items()) for m, choices in machines.items()}
        self._identity = repr(sorted(chosen.items()))
        self._kinds = {machine: {_kind(text) for text in choices} for machine, choices in machines.items()}
        self._warned = False

    def choice(self, platform: str, pass_name: str, call: Call) -> Choice | None:
        """The choice for a pass of a call on a platform ("cpu" or "cuda"); None if it was not measured here.

        In a program of several processes the machine is that of the first process, here and in `covers`: a tuning makes
        the same choice in all of them, as processes on unlike machines must lower the same program.
        """
        machine = program_environment()
        if machine is None or machine.platform != platform or machine not in self.machines:
            return None
        return self.machines[machine].get(call.text(pass_name, platform))

    def covers(self, call: Call, pass_name: str) -> bool:
        """Whether there are choices on this machine for calls of the same kind, whatever their shapes.

        Warns once where there is none at all, because the choices were measured on other machines.
        """
        machine = program_environment()
        if machine is None or machine not in self.machines:
            self._warn_once(machine)
            return False
        return _kind(call.text(pass_name, machine.platform)) in self._kinds[machine]

    def _warn_once(self, machine: Environment | None) -> None:
        if self._warned or not self.machines:
            return
        self._warned = True
        if machine is None:
            reason = (
                "the environment of the first process is not known in this program of several processes; call "
                "jaxgrad.Tuning.load or jaxgrad.tune in every process"
            )
        else:
            reason = f"it was measured with {'; or '.join(map(machine.differences, self.machines))}"
        warn_caller(f"the tuning has no effect here, because {reason}", RuntimeWarning)

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and self._identity == other._identity

    def __hash__(self) -> int:
        return hash(self._identity)

    def __repr__(self) -> str:
        """The name of a jitted pass depends on it."""
        return f"<jaxgrad.Tuning {hashlib.sha256(self._identity.encode()).hexdigest()[:16]}>"


def _kind(text: str) -> str:
    """The kind of call that a text is of: "conv", "gru" and so on."""
    return text.partition(" ")[0]


@dataclasses.dataclass(frozen=True)
class Measurable:
    """A call in every way to compute it.

    Attributes:
      functions: by implementation, as `Choice` names them: functions of the operands.
      operands: shapes and dtypes of random arrays, and arrays whose values are chosen.
      one_call_a_program: whether a program has only one call, because XLA would compile the loops of each call.
    """

    functions: Mapping[str, Callable[..., Any]]
    operands: Sequence[Any]
    one_call_a_program: bool = False


class Recorder(MeasuredChoices):
    """Records the calls that the selection looks up, instead of choices.

    Attributes:
      calls: by their texts, in the order in which they were lowered.
    """

    def __init__(self) -> None:
        super().__init__({})
        self.calls: dict[str, RecordedCall] = {}
        self._token = uuid.uuid4().hex

    def covers(self, call: Call, pass_name: str) -> bool:
        return True

    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return id(self)

    def __repr__(self) -> str:
        """Unique, because caches of programs, those on disk too, depend on it."""
        return f"<Recorder {self._token}>"


@dataclasses.dataclass(frozen=True)
class RecordedCall:
    """A pass of a call, which is recorded when a program that makes it is lowered.

    Attributes:
      recorder: records it.
      pass_name: the pass.
      call: the call.
      implementations: those that run it without a tuning, one for each platform at most.
    """

    recorder: Recorder
    pass_name: str
    call: Call
    implementations: tuple[str, ...]

    def lowered_for(self, platform: str) -> None:
        self.recorder.calls.setdefault(self.call.text(self.pass_name, platform), self)
