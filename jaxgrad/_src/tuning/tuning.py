"""`jaxgrad.Tuning`: measured choices between implementations, which can be saved, merged and put in force."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import jax

from jaxgrad._src.choice import old_names, settings
from jaxgrad._src.choice.environment import Environment, program_environment, share_first_environment
from jaxgrad._src.choice.measured_choices import Choice, MeasuredChoices
from jaxgrad._src.choice.op import IMPLEMENTATIONS
from jaxgrad._src.conv.backend import PASSES
from jaxgrad._src.core.files import replace_file
from jaxgrad._src.core.processes import text_of_first_process
from jaxgrad._src.core.reentrant import Reentrant
from jaxgrad._src.version import __version__

_logger = logging.getLogger("jaxgrad")

_FORMAT = 2
_Member = TypeVar("_Member")


class Tuning(MeasuredChoices, Reentrant):
    """The chosen implementation of each call, as `jaxgrad.tune` has measured it, for one or more machines.

    A tuning is in force inside `with tuning:`, and in the whole process after
    `jaxgrad.config.update(tuning=tuning)`. A function under `jax.jit` is traced again where the tuning changes.

    It applies to calls of the same shapes, dtypes and arguments, on the same kind of device, and with the same versions
    of jax, jaxlib, jaxgrad, cuDNN or oneDNN, and the driver. With others it has no effect but a warning. A call that
    forces an implementation is left alone. In a program of several processes, the device and the versions of the first
    process decide for all.

    Two tunings are equal if they choose the same implementations. Programs depend on these alone, and not on the times.

    It prints as a table. `tuning | other` has the choices of both, those of `other` where both have one.

    Examples:
      >>> def loss(w, x):
      ...   return jnp.sum(jaxgrad.conv_general_dilated(x, w, (1, 1), "SAME") ** 2)
      >>> w, x = jnp.ones((8, 8, 3, 3)), jnp.ones((2, 8, 16, 16))
      >>> tuning = jaxgrad.tune(jax.grad(loss), w, x, progress=False)
      >>> len(tuning.choices)
      2
      >>> with tuning:
      ...     gradient = jax.jit(jax.grad(loss))(w, x)
    """

    def __init__(self, machines: Mapping[Environment, Mapping[str, Choice]]) -> None:
        MeasuredChoices.__init__(self, machines)
        Reentrant.__init__(self)

    @property
    def choices(self) -> Mapping[str, Choice]:
        """The choices for this machine, by the description of the call.

        In a program of several processes: for the machine of the first process.
        """
        machine = program_environment()
        return MappingProxyType({}) if machine is None else self.machines.get(machine, MappingProxyType({}))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes a JSON file. In a program of several processes the first one writes it.

        A file that is there is replaced at once and keeps its permissions: a process that ends while it saves leaves
        the old one.

        Raises:
          TypeError: path is no path.
          OSError: the file cannot be written.
        """
        _check_path("save", path)
        if jax.process_index() == 0:
            replace_file(path, to_json(self) + "\n")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Tuning:
        """Reads a file that `save` has written.

        In a program of several processes each process must call it. All take what the first one reads, and the choices
        for its machine, so that they lower the same program.

        Raises:
          TypeError: path is no path.
          OSError: the file cannot be read.
          ValueError: the file is not a tuning, or a choice that this release of jaxgrad has measured names an unknown
            implementation. Choices of other releases are loaded, and have no effect here.
        """
        _check_path("load", path)
        share_first_environment()
        try:
            tuning = from_json(text_of_first_process(lambda: Path(path).read_text(encoding="utf-8")))
            _check_implementations(tuning)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"jaxgrad.Tuning.load: {os.fspath(path)!r} is no tuning: {error}") from error
        for machine, choices in tuning.machines.items():
            _logger.info("%d choices for %s in the tuning %s", len(choices), machine, os.fspath(path))
        return tuning

    def __or__(self, other: Tuning) -> Tuning:
        if not isinstance(other, Tuning):
            return NotImplemented
        machines = [*self.machines, *(machine for machine in other.machines if machine not in self.machines)]
        return Tuning({m: {**self.machines.get(m, {}), **other.machines.get(m, {})} for m in machines})

    def _new_context(self) -> AbstractContextManager[Any]:
        return settings.override(tuning=self)

    def __reduce__(self) -> tuple[Any, ...]:
        return from_json, (to_json(self),)

    def __str__(self) -> str:
        tables = ("\n".join(_table(machine, choices)) for machine, choices in self.machines.items())
        return "\n\n".join(tables) or "an empty tuning"


def _check_path(method: str, path: Any) -> None:
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"jaxgrad.Tuning.{method}: path must be a str or an os.PathLike, got {type(path).__name__}")


def _check_implementations(tuning: Tuning) -> None:
    """Raises ValueError where a choice that this release has measured names an implementation that it does not have."""
    of_ops = set(IMPLEMENTATIONS)
    of_equations = {"xla", *(f"{pass_name} on {each}" for pass_name in PASSES for each in of_ops)}
    for machine, choices in tuning.machines.items():
        for text, choice in choices.items() if machine.jaxgrad == __version__ else ():
            known = of_equations if text.startswith("jax.lax ") else of_ops
            if unknown := choice.times_us.keys() - known:
                raise ValueError(f"the choice of {text!r}: jaxgrad has no implementation {min(unknown)!r} for it")


def to_json(tuning: Tuning) -> str:
    """The content of a file."""
    machines = [
        {
            "environment": dataclasses.asdict(machine),
            "choices": {call: {**vars(choice), "times_us": dict(choice.times_us)} for call, choice in choices.items()},
        }
        for machine, choices in tuning.machines.items()
    ]
    return json.dumps({"format": _FORMAT, "machines": machines}, indent=1)


def from_json(text: str) -> Tuning:
    """Raises ValueError where the text is no tuning."""
    content = json.loads(text)
    file_format = _member(content, "format", int)
    if isinstance(file_format, bool) or file_format not in (_FORMAT, old_names.TUNING_FORMAT):
        raise ValueError(
            f"its format is {file_format!r}, and this jaxgrad reads {old_names.TUNING_FORMAT} and {_FORMAT}"
        )
    machines: dict[Environment, dict[str, Choice]] = {}
    for machine in _member(content, "machines", list):
        environment = _environment(_member(machine, "environment", dict))
        if environment in machines:
            raise ValueError(f"it has this machine twice: {environment}")
        choices = {call: _choice(call, choice) for call, choice in _member(machine, "choices", dict).items()}
        old = file_format == old_names.TUNING_FORMAT
        machines[environment] = old_names.current_choices(choices) if old else choices
    return Tuning(machines)


def _environment(content: Mapping[str, Any]) -> Environment:
    names = {field.name for field in dataclasses.fields(Environment)}
    if unknown := content.keys() - names:
        raise ValueError(f"an environment has the unknown member {min(unknown)!r}")
    return Environment(**{name: _member(content, name, str) for name in names})


def _choice(call: str, content: Any) -> Choice:
    try:
        return _read_choice(content)
    except (ValueError, OverflowError) as error:
        raise ValueError(f"the choice of {call!r}: {error}") from error


def _read_choice(content: Any) -> Choice:
    times = _member(content, "times_us", dict)
    if wrong := [us for us in times.values() if isinstance(us, bool) or not isinstance(us, int | float)]:
        raise ValueError(f"a time must be a number of microseconds, got {wrong[0]!r}")
    implementation, default = (_member(content, name, str) for name in ("implementation", "default"))
    # The date is optional.
    date = _member({"date": "", **content}, "date", str)
    return Choice(implementation, default, {name: float(us) for name, us in times.items()}, date)


def _member(content: Any, name: str, kind: type[_Member]) -> _Member:
    """A value of a JSON object."""
    if not isinstance(content, dict) or name not in content:
        raise ValueError(f"it has no {name!r} where one must be")
    if not isinstance(content[name], kind):
        raise ValueError(f"{name!r} must be of type {kind.__name__}, got {type(content[name]).__name__}")
    return content[name]


def _table(machine: Environment, choices: Mapping[str, Choice]) -> Iterator[str]:
    yield str(machine)
    header = ("call", "choice", "gain", "microseconds")
    rows = [(call, c.implementation, f"{c.gain:.2f}x", c.times) for call, c in choices.items()]
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    for row in (header, *rows):
        yield "  ".join(map(str.ljust, row, widths)).rstrip()
