"""The algebra of forward mode: the functions that the primitive of `_forward_mode` carries.

A `Map` is a function of arrays. The derivative of one is another, `_Push`, linear in the tangents, and the transpose of
that is a third, `_Pull`:

  Value   (x)      -> y                    the op itself
  _Push   (x, x')  -> y' = J(x) x'         the op's own tangent rule
  _Pull   (x, dy)  -> dx = J(x)^T dy       the op's own reverse mode

The last two are differentiated as any map is, so the modes nest to any order. Derivatives of derivatives are taken of
the op's formula in plain JAX, where it has one, or of the op, whose reverse mode has an order as high as is asked for:
reverse mode that is differentiated in reverse, along the cotangents, is forward mode.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class Rules:
    """What forward mode takes from an op `op(spec, *arrays)`, a `jax.custom_vjp` function of arrays or None.

    Attributes:
      tangent: `tangent(spec, primals, tangents)`, the tangent of what the op returns; a tangent of None is zero.
      formula: `formula(spec, *arrays)`, what the op returns, in plain JAX. An op without it must be differentiable in
        reverse to any order, and so must its tangent.
      gradient: `gradient(spec, arrays, cotangents, wanted)`, the formula's reverse mode in plain JAX, where it has a
        faster one than JAX's: of the arrays that are wanted, None for the others, from the cotangents by position.
      differentiated: called for the op where it is differentiated: the kernel call that its reverse mode makes too, so
        that XLA makes one of the two. None where the op makes the same call by itself.
    """

    tangent: Callable[..., Any] | None = None
    formula: Callable[..., Any] | None = None
    gradient: Callable[..., Any] | None = None
    differentiated: Callable[..., Any] | None = None


class Map(abc.ABC):
    """A function of arrays, hashable."""

    @property
    def linear(self) -> int:
        """How many of its arguments, the last ones, it is linear in."""
        return 0

    @abc.abstractmethod
    def __call__(self, *arrays: jax.Array) -> Any: ...

    def formula(self) -> Callable[..., Any] | None:
        """The same function in plain JAX, if there is one."""
        return None

    def differentiated(self) -> Map:
        """The same function, to be called beside its derivative."""
        return self

    def push(self, wanted: tuple[int, ...]) -> Map:
        """The derivative along tangents of the `wanted` arguments, which follow the arguments."""
        return _Push(self, wanted, None)

    def transposed(self, wanted: tuple[int, ...], given: tuple[int, ...]) -> Map:
        """The transpose in the `wanted` of the linear arguments, from cotangents of the `given` results."""
        raise TypeError(f"{self} is linear in no argument")

    def tangent_operand(self, position: int, tangent: jax.Array) -> jax.Array:
        """A tangent of the argument at `position`, as `push` takes it."""
        return tangent


@dataclasses.dataclass(frozen=True)
class Value(Map):
    """An op itself."""

    op: Callable[..., Any]
    rules: Rules
    spec: Any
    tree: Any  # of the operands, some of which may be None

    def __call__(self, *arrays):
        return self.op(self.spec, *self.operands(arrays))

    def formula(self):
        formula = self.rules.formula
        return None if formula is None else lambda *arrays: formula(self.spec, *self.operands(arrays))

    def differentiated(self):
        return dataclasses.replace(self, op=self.rules.differentiated or self.op)

    def operands(self, arrays: Sequence[Any]) -> Any:
        return jax.tree.unflatten(self.tree, arrays)


@dataclasses.dataclass(frozen=True)
class _Push(Map):
    """(*arguments, *tangents of those `wanted`) -> tangents of the results `given`, of all where that is None."""

    of: Map
    wanted: tuple[int, ...]
    given: tuple[int, ...] | None

    @property
    def linear(self) -> int:
        return len(self.wanted)

    def __call__(self, *arrays):
        if isinstance(self.of, Value) and self.of.rules.tangent is not None:
            primals, tangents = _split(self, arrays)
            by_position = dict(zip(self.wanted, tangents, strict=True))
            every = [by_position.get(i) for i in range(len(primals))]
            results = self.of.rules.tangent(self.of.spec, self.of.operands(primals), self.of.operands(every))
            return _pick(jax.tree.leaves(results), self.given)
        formula = self.formula()
        if formula is not None:
            return formula(*arrays)
        # The pullback is linear, so that its transpose, which reverse mode takes of it, is the same everywhere.
        function, at, tangents = _in_wanted(self.of, self, arrays)
        results, pullback = jax.vjp(function, *at)
        return jax.vjp(pullback, jax.tree.map(jnp.zeros_like, results))[1](tuple(tangents))[0]

    def formula(self):
        formula = self.of.formula()
        if formula is None:
            return None

        def pushed(*arrays):
            function, at, tangents = _in_wanted(formula, self, arrays)
            return jax.jvp(function, at, tangents)[1]

        return pushed

    def transposed(self, wanted, given):
        return _Pull(self.of, _pick(self.wanted, wanted), given if self.given is None else _pick(self.given, given))


@dataclasses.dataclass(frozen=True)
class _Pull(Map):
    """(*arguments, *cotangents of the results `given`) -> gradients of the arguments `wanted`."""

    of: Map
    wanted: tuple[int, ...]
    given: tuple[int, ...]

    @property
    def linear(self) -> int:
        return len(self.given)

    def __call__(self, *arrays):
        formula = None if isinstance(self.of, Value) else self.of.formula()
        return self._pulled(formula or self.of, arrays)

    def formula(self):
        if isinstance(self.of, Value) and (gradient := self.of.rules.gradient) is not None:
            return partial(self._by_rule, gradient, self.of)
        formula = self.of.formula()
        return None if formula is None else lambda *arrays: self._pulled(formula, arrays)

    def _by_rule(self, gradient: Callable[..., Any], value: Value, *arrays: jax.Array) -> Any:
        primals, cotangents = _split(self, arrays)
        wanted = value.operands([i in self.wanted for i in range(len(primals))])
        by_position = dict(zip(self.given, cotangents, strict=True))
        return jax.tree.leaves(gradient(value.spec, value.operands(primals), by_position, wanted))

    def _pulled(self, of: Callable[..., Any], arrays: Sequence[jax.Array]) -> Any:
        function, at, cotangents = _in_wanted(of, self, arrays)
        return jax.vjp(function, *at)[1](cotangents)

    def transposed(self, wanted, given):
        return _Push(self.of, _pick(self.wanted, given), _pick(self.given, wanted))


@dataclasses.dataclass(frozen=True)
class Batched(Map):
    """A map over the first axis of the arguments whose axis is 0, of `size`; every linear argument is one of them."""

    of: Map
    axes: tuple[int | None, ...]
    size: int

    @property
    def linear(self) -> int:
        return self.of.linear

    def __call__(self, *arrays):
        return jax.vmap(self.of, self.axes)(*arrays)

    def differentiated(self):
        return Batched(self.of.differentiated(), self.axes, self.size)

    def push(self, wanted):
        return Batched(self.of.push(wanted), self.axes + (0,) * len(wanted), self.size)

    def transposed(self, wanted, given):
        kept = self.axes[: len(self.axes) - self.linear]
        return Batched(self.of.transposed(wanted, given), kept + (0,) * len(given), self.size)

    def tangent_operand(self, position, tangent):
        return tangent if self.axes[position] == 0 else jnp.broadcast_to(tangent, (self.size, *tangent.shape))


def _pick(values: Sequence[Any], positions: Sequence[int] | None) -> tuple[Any, ...]:
    return tuple(values) if positions is None else tuple(values[i] for i in positions)


def _split(derivative: _Push | _Pull, arrays: Sequence[jax.Array]) -> tuple[list[jax.Array], list[jax.Array]]:
    """The arguments of the map that it is the derivative of, and those it is linear in."""
    count = len(arrays) - derivative.linear
    return list(arrays[:count]), list(arrays[count:])


def _in_wanted(
    of: Callable[..., Any], derivative: _Push | _Pull, arrays: Sequence[jax.Array]
) -> tuple[Callable[..., Any], list[jax.Array], list[jax.Array]]:
    """`of` as a function of the wanted arguments alone to the given results, where they are, and the directions."""
    primals, directions = _split(derivative, arrays)

    def function(*wanted):
        arguments = list(primals)
        for i, array in zip(derivative.wanted, wanted, strict=True):
            arguments[i] = array
        return list(_pick(jax.tree.leaves(of(*arguments)), derivative.given))

    return function, [primals[i] for i in derivative.wanted], directions
