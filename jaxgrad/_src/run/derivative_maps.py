"""The functions that the primitive of forward mode carries, closed under differentiation and transposition.

A `Map` is a function of arrays. Its derivative is a `Jvp`, which is linear in the tangents. The transpose of a `Jvp` is
a `Vjp`:

  Primal  (x)      -> y                    the op itself
  Jvp     (x, x')  -> y' = J(x) x'         the op's jvp rule
  Vjp     (x, dy)  -> dx = J(x)^T dy       the op's reverse mode

All three are maps and can be differentiated again, so the modes nest to any order. Derivatives of a `Jvp` or a `Vjp`
are derivatives of the op's formula in plain JAX, if it has one. Otherwise they are derivatives of the op itself, whose
reverse mode works to any order: reverse mode, differentiated in reverse along the cotangents, is forward mode.
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
class JvpRules:
    """The rules of forward mode for `op(params, *arrays)`, a `jax.custom_vjp` function of arrays or None.

    Attributes:
      tangent: `tangent(params, primals, tangents)`, the tangent of the results. A tangent that is None is zero.
      formula: `formula(params, *arrays)`, the results in plain JAX. Without a formula, the op and its `tangent` must be
        differentiable in reverse to any order.
      gradient: `gradient(params, arrays, cotangents, needed)`, the formula's gradients in plain JAX, if there is a
        faster way than JAX's: for the arrays that are `needed`, None for the others. `cotangents` maps the
        positions of results to arrays.
      differentiated: `differentiated(params, *arrays)`, called instead of the op beside its derivative: it makes the
        same kernel call as reverse mode, so that XLA merges the two calls. None if the op itself does.
    """

    tangent: Callable[..., Any] | None = None
    formula: Callable[..., Any] | None = None
    gradient: Callable[..., Any] | None = None
    differentiated: Callable[..., Any] | None = None


class Map(abc.ABC):
    """A function of arrays, hashable."""

    @property
    def linear(self) -> int:
        """The number of arguments, counted from the last one, in which the map is linear."""
        return 0

    @abc.abstractmethod
    def __call__(self, *arrays: jax.Array) -> Any: ...

    def formula(self) -> Callable[..., Any] | None:
        """Returns the same function in plain JAX, or None."""
        return None

    def differentiated(self) -> Map:
        """Returns the map to call beside its derivative."""
        return self

    def jvp_map(self, needed: tuple[int, ...]) -> Map:
        """Returns the derivative along tangents of the `needed` arguments. The tangents follow the arguments."""
        return Jvp(self, needed, None)

    def transposed(self, needed: tuple[int, ...], given: tuple[int, ...]) -> Map:
        """Returns the transpose in the `needed` linear arguments, from cotangents of the `given` results."""
        raise TypeError(f"{self} is linear in no argument")

    def tangent_operand(self, position: int, tangent: jax.Array) -> jax.Array:
        """Returns a tangent of the argument at `position` in the form that `jvp_map` takes."""
        return tangent


@dataclasses.dataclass(frozen=True)
class Primal(Map):
    """An op itself."""

    op: Callable[..., Any]
    rules: JvpRules
    params: Any
    tree: Any  # of the operands, some of which may be None

    def __call__(self, *arrays):
        return self.op(self.params, *self.operands(arrays))

    def formula(self):
        formula = self.rules.formula
        return None if formula is None else lambda *arrays: formula(self.params, *self.operands(arrays))

    def differentiated(self):
        return dataclasses.replace(self, op=self.rules.differentiated or self.op)

    def operands(self, arrays: Sequence[Any]) -> Any:
        return jax.tree.unflatten(self.tree, arrays)


@dataclasses.dataclass(frozen=True)
class Jvp(Map):
    """(*arguments, *tangents of the arguments `needed`) -> tangents of the results `given`; None for all results."""

    of: Map
    needed: tuple[int, ...]
    given: tuple[int, ...] | None

    @property
    def linear(self) -> int:
        return len(self.needed)

    def __call__(self, *arrays):
        if isinstance(self.of, Primal) and self.of.rules.tangent is not None:
            primals, tangents = _split(self, arrays)
            by_position = dict(zip(self.needed, tangents, strict=True))
            every = [by_position.get(i) for i in range(len(primals))]
            results = self.of.rules.tangent(self.of.params, self.of.operands(primals), self.of.operands(every))
            return _pick(jax.tree.leaves(results), self.given)
        formula = self.formula()
        if formula is not None:
            return formula(*arrays)
        # The pullback is linear, so its own vjp at zero is the Jacobian times the tangents.
        function, at, tangents = _of_needed(self.of, self, arrays)
        results, pullback = jax.vjp(function, *at)
        return jax.vjp(pullback, jax.tree.map(jnp.zeros_like, results))[1](tuple(tangents))[0]

    def formula(self):
        formula = self.of.formula()
        if formula is None:
            return None

        def pushed(*arrays):
            function, at, tangents = _of_needed(formula, self, arrays)
            return jax.jvp(function, at, tangents)[1]

        return pushed

    def transposed(self, needed, given):
        return Vjp(self.of, _pick(self.needed, needed), given if self.given is None else _pick(self.given, given))


@dataclasses.dataclass(frozen=True)
class Vjp(Map):
    """(*arguments, *cotangents of the results `given`) -> gradients of the arguments `needed`."""

    of: Map
    needed: tuple[int, ...]
    given: tuple[int, ...]

    @property
    def linear(self) -> int:
        return len(self.given)

    def __call__(self, *arrays):
        formula = None if isinstance(self.of, Primal) else self.of.formula()
        return self._pulled(formula or self.of, arrays)

    def formula(self):
        if isinstance(self.of, Primal) and (gradient := self.of.rules.gradient) is not None:
            return partial(self._by_rule, gradient, self.of)
        formula = self.of.formula()
        return None if formula is None else lambda *arrays: self._pulled(formula, arrays)

    def _by_rule(self, gradient: Callable[..., Any], primal: Primal, *arrays: jax.Array) -> Any:
        primals, cotangents = _split(self, arrays)
        needed = primal.operands([i in self.needed for i in range(len(primals))])
        by_position = dict(zip(self.given, cotangents, strict=True))
        return jax.tree.leaves(gradient(primal.params, primal.operands(primals), by_position, needed))

    def _pulled(self, of: Callable[..., Any], arrays: Sequence[jax.Array]) -> Any:
        function, at, cotangents = _of_needed(of, self, arrays)
        return jax.vjp(function, *at)[1](cotangents)

    def transposed(self, needed, given):
        return Jvp(self.of, _pick(self.needed, given), _pick(self.given, needed))


@dataclasses.dataclass(frozen=True)
class Batched(Map):
    """`jax.vmap` of a map over the arguments whose axis is 0, which has `size`. All linear arguments are mapped."""

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

    def jvp_map(self, needed):
        return Batched(self.of.jvp_map(needed), self.axes + (0,) * len(needed), self.size)

    def transposed(self, needed, given):
        kept = self.axes[: len(self.axes) - self.linear]
        return Batched(self.of.transposed(needed, given), kept + (0,) * len(given), self.size)

    def tangent_operand(self, position, tangent):
        return tangent if self.axes[position] == 0 else jnp.broadcast_to(tangent, (self.size, *tangent.shape))


def _pick(values: Sequence[Any], positions: Sequence[int] | None) -> tuple[Any, ...]:
    return tuple(values) if positions is None else tuple(values[i] for i in positions)


def _split(derivative: Jvp | Vjp, arrays: Sequence[jax.Array]) -> tuple[list[jax.Array], list[jax.Array]]:
    """Returns the arguments of the differentiated map, and the tangents or cotangents."""
    count = len(arrays) - derivative.linear
    return list(arrays[:count]), list(arrays[count:])


def _of_needed(
    of: Callable[..., Any], derivative: Jvp | Vjp, arrays: Sequence[jax.Array]
) -> tuple[Callable[..., Any], list[jax.Array], list[jax.Array]]:
    """Returns `of` as a function from the needed arguments to the given results, their values, and the directions."""
    primals, directions = _split(derivative, arrays)

    def function(*needed):
        arguments = list(primals)
        for i, array in zip(derivative.needed, needed, strict=True):
            arguments[i] = array
        return list(_pick(jax.tree.leaves(of(*arguments)), derivative.given))

    return function, [primals[i] for i in derivative.needed], directions
