"""Where in a program an equation stands: the line that wrote it, and the named scopes around it."""

from __future__ import annotations

import dataclasses
import os
import sys
import sysconfig

from jax.extend.core import JaxprEqn

from jaxgrad._src.core import jax_internals

# An equation belongs to the innermost line outside these packages.
_LIBRARIES = ("jax", "jaxlib", "jaxgrad", "flax", "haiku", "equinox", "jaxtyping", "keras", "optax")


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a jaxpr stands.

    Attributes:
      source: the line of the equation that contains the jaxpr: file, line and function.
      scopes: the named scopes around that equation.
      repeats: how often the loops of `jax.lax.scan` around it run the jaxpr.
    """

    source: str = "unknown"
    scopes: tuple[str, ...] = ()
    repeats: int = 1

    @property
    def scope(self) -> str:
        return "/".join(self.scopes)

    def of(self, equation: JaxprEqn) -> Place:
        """The place of the equation of the jaxpr."""
        return Place(_source(equation, self.source), (*self.scopes, *jax_internals.scopes(equation)), self.repeats)

    def inside(self, equation: JaxprEqn) -> Place:
        """The place of the jaxprs in an equation, from that of the equation. A loop of unknown length runs once."""
        length = equation.params["length"] if equation.primitive.name == "scan" else 1
        return dataclasses.replace(self, repeats=self.repeats * (length if isinstance(length, int) else 1))


def _source(equation: JaxprEqn, outer: str) -> str:
    """The innermost line outside the libraries; `outer` if there is none."""
    libraries = tuple(os.path.dirname(os.path.abspath(path)) + os.sep for path in _library_files())
    for frame in jax_internals.frames(equation):
        if not os.path.abspath(frame.file_name).startswith(libraries):
            return f"{os.path.relpath(frame.file_name)}:{frame.line_num} ({frame.function_name.rsplit('.', 1)[-1]})"
    return outer


def _library_files() -> list[str]:
    found = [getattr(sys.modules.get(name), "__file__", None) for name in _LIBRARIES]
    return [*filter(None, found), os.path.join(sysconfig.get_path("stdlib"), "contextlib.py")]
