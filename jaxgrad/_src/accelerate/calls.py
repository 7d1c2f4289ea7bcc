"""The calls of a program that `jaxgrad.report` lists, and its layers."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Sequence

_NUMBER = re.compile(r"\d+")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Call:
    """Calls of a pass that are alike: of a convolution, a normalization, a pooling or a GRU.

    Attributes:
      op: "conv", "batch_norm", "group_norm", "layer_norm", "rms_norm", "max_pool", "avg_pool" or "gru".
      source: the line that calls them: file, line and function.
      scope: the named scopes around them, such as modules of flax linen, Haiku and equinox; empty if there are none.
      shapes: dtype and shape of the arrays.
      pass_name: what they compute: "forward", "backward", "input_gradient", "weight_gradient" or "tangent". Empty for
        a convolution that no pass of jaxgrad computes.
      implementation: what they run on, as in `jaxgrad.Explanation`. "xla" also for a matrix product or another
        convolution that jaxgrad writes in place of a convolution.
      reason: why, in one sentence. For a convolution that an op of jaxgrad calls, that the op selected it:
        `jaxgrad.explain` says why.
      moved: "selected" if jaxgrad's tables or a tuning select what runs in place of XLA's code, "forced" if
        `implementation=` does, and empty if they run as without jaxgrad.
      flops: the floating-point operations of one call, 2 for each product: of a convolution as XLA counts them, without
        products with padding, and of the matrix products of a GRU. They do not depend on the implementation. 0 for
        batch normalization and pooling, whose time is memory traffic. None for symbolic shapes.
      count: the number of equations.
      repeats: how often the loops of `jax.lax.scan` around them run each equation.
    """

    op: str
    source: str
    scope: str = ""
    shapes: str
    pass_name: str
    implementation: str
    reason: str
    moved: str = ""
    flops: int | None
    count: int = 1
    repeats: int = 1

    @property
    def total_flops(self) -> int | None:
        """The operations of all of them."""
        return None if self.flops is None else self.count * self.repeats * self.flops


@dataclasses.dataclass(frozen=True, kw_only=True)
class Convolution(Call):
    """Convolutions of a program that are alike: a `Call` whose arrays have names.

    Attributes:
      lhs, rhs, result: dtype, shape and layout, such as "f32[8,32,32,3] NHWC".
      groups: the number of groups of the equation.
    """

    op: str = "conv"
    lhs: str
    rhs: str
    result: str
    groups: int = 1


@dataclasses.dataclass(frozen=True)
class Layer:
    """The calls of one line of a program, in modules whose names differ in numbers only.

    Attributes:
      source: the line, as in `Call`.
      scope: the named scopes, as in `Call`; numbers that differ are "*".
      calls: the calls, in the order of the program.
    """

    source: str
    scope: str
    calls: tuple[Call, ...]

    @property
    def flops(self) -> int | None:
        """The operations of its calls, None for symbolic shapes."""
        return total_flops(call.total_flops for call in self.calls)


def layers_of(calls: Iterable[Call]) -> tuple[Layer, ...]:
    """The layers of a program, in its order."""
    found: dict[tuple[str, str], list[Call]] = {}
    for call in calls:
        found.setdefault((call.source, _NUMBER.sub("*", call.scope)), []).append(call)
    layers = []
    for (source, _), own in found.items():
        layers.append(Layer(source, _common([call.scope for call in own]), tuple(own)))
    return tuple(layers)


def _common(scopes: Sequence[str]) -> str:
    """The scopes as one text, in which numbers that differ are "*"."""
    columns = zip(*map(_NUMBER.findall, scopes), strict=True)
    numbers = iter([column[0] if len(set(column)) == 1 else "*" for column in columns])
    return _NUMBER.sub(lambda _: next(numbers), scopes[0])


def total_flops(values: Iterable[int | None]) -> int | None:
    """The sum; None if a value is unknown."""
    known = tuple(values)
    return None if None in known else sum(filter(None, known))
