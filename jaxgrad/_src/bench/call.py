"""The interface of a call that is measured, and the passes that calls have."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax

from jaxgrad._src.choice.explain import Explanation, PassExplanation


@dataclasses.dataclass(frozen=True)
class Pass:
    """A part of a call that is timed by itself.

    Attributes:
      name: in tables.
      of: the function to time, of inputs and cotangents, made of a function of the inputs.
      explained: indices of the passes in the order of the op, as `jaxgrad.explain` has them, that the function runs.
    """

    name: str
    of: Callable[[Callable[..., Any]], Callable[..., Any]]
    explained: tuple[int, ...]


class Call(Protocol):
    """A call of an op.

    Attributes:
      text: the option of the command line without its dashes, and its value.
      dtype: of the arrays; empty where the command line has none for this call.
      passes: that are timed.
      total: the names of the passes whose times add up to that of the value and all gradients.
      one_call_a_program: whether a program on a GPU has only one call, which takes longer than the program's start.
    """

    @property
    def text(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def passes(self) -> tuple[Pass, ...]: ...
    @property
    def total(self) -> tuple[str, ...]: ...
    @property
    def one_call_a_program(self) -> bool: ...

    def operands(self) -> list[jax.ShapeDtypeStruct]:
        """Inputs and cotangents."""
        ...

    def deviations(self) -> list[float]:
        """The standard deviations of the operands."""
        ...

    def on_jaxgrad(self, *inputs: Any) -> Any:
        """The value, by jaxgrad with its default selection."""
        ...

    def on_xla(self, *inputs: Any) -> Any:
        """The value, as a user of JAX writes it."""
        ...

    def explanation(self) -> Explanation: ...


def implementations(call: Call) -> dict[str, tuple[PassExplanation, ...]]:
    """The implementations of each timed pass, by its name."""
    explanation = call.explanation()
    alike = PassExplanation("all", explanation.implementation, explanation.reason, explanation.preference)
    passes = explanation.passes or [alike] * (1 + max(index for each in call.passes for index in each.explained))
    return {each.name: tuple(passes[index] for index in each.explained) for each in call.passes}


def value(layer: Callable[..., Any], inputs: int) -> Callable[..., Any]:
    """The value alone, of operands that begin with so many inputs."""
    return lambda *operands: layer(*operands[:inputs])


def gradient(layer: Callable[..., Any], inputs: int, index: int) -> Callable[..., Any]:
    """The gradient of one input alone, of operands that end with the cotangent of an array."""

    def run(*operands: Any) -> Any:
        def of_one(operand: Any) -> Any:
            return layer(*operands[:index], operand, *operands[index + 1 : inputs])

        return jax.vjp(of_one, operands[index])[1](operands[-1])

    return run


def value_and_gradients(layer: Callable[..., Any], inputs: int) -> Callable[..., Any]:
    """The value and the gradients of all inputs."""

    def run(*operands: Any) -> Any:
        y, pullback = jax.vjp(layer, *operands[:inputs])
        return y, pullback(jax.tree.unflatten(jax.tree.structure(y), operands[inputs:]))

    return run


def shaped(shapes: Sequence[tuple[int, ...]], dtypes: Sequence[str]) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]
