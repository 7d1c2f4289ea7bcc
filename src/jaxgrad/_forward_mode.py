"""Forward mode: the switch, and the primitive that the ops become under it.

A `jax.custom_vjp` has no forward mode, so under the switch an op is a call of `_call_p` instead. That primitive carries
a `Map`, a function of arrays, and its rules never look inside. The derivative of a map is another map, `_Push`, linear
in the tangents, and the transpose of that is a third, `_Pull`:

  _Value  (x)      -> y                    the op itself
  _Push   (x, x')  -> y' = J(x) x'         the op's own tangent rule
  _Pull   (x, dy)  -> dx = J(x)^T dy       the op's own reverse mode

The last two are differentiated as any map is, so the modes nest to any order. Derivatives of derivatives are taken of
the op's formula in plain JAX, where it has one, or of the op, whose reverse mode has an order as high as is asked for:
reverse mode that is differentiated in reverse, along the cotangents, is forward mode.
"""

from __future__ import annotations

import abc
import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir

# Part of the keys of jax.jit's caches: a function that was compiled without the switch is traced anew under it.
_switch = jax.make_user_context(False)

_HINT = "jaxgrad's ops have forward mode inside `with jaxgrad.forward_mode():`, see docs/forward_mode.md."


def forward_mode() -> contextlib.AbstractContextManager[None]:
    """Gives every op forward mode inside a `with` block: `jax.jvp`, `jax.linearize`, `jax.jacfwd`, `jax.hessian`.

    Without it an op is a `jax.custom_vjp` function, and JAX raises "can't apply forward-mode autodiff (jvp) to
    a custom_vjp function". Inside the block both modes work, and nest to any order. The block must hold the call of the
    transformation that differentiates; functions under `jax.jit` are traced anew in it.

    Values and gradients come from the same kernels as outside; docs/forward_mode.md tells what the tangents of each op
    run on, and what reverse mode costs inside the block.

    Returns:
      A context manager. It counts for the thread that enters it.

    Example:
      >>> with jaxgrad.forward_mode():
      ...     loss, slope = jax.jvp(loss_of, (parameters,), (direction,))
      ...     product = jax.jvp(jax.grad(loss_of), (parameters,), (direction,))[1]  # the Hessian times direction
    """
    return _switch(True)


def jvp(
    fun: Callable[..., Any], primals: Sequence[Any], tangents: Sequence[Any], has_aux: bool = False
) -> tuple[Any, ...]:
    """`jax.jvp` of a function that calls jaxgrad's ops: the value of `fun` and its derivative along `tangents`.

    Args:
      fun: the function, of as many positional arguments as there are primals.
      primals: the arguments at which it is differentiated: arrays or trees of them.
      tangents: the direction, of the structure, shapes and dtypes of the primals.
      has_aux: `fun` returns a pair whose second part is not differentiated.

    Returns:
      `(value, tangent)`, or `(value, tangent, aux)` with `has_aux`.

    Raises:
      TypeError, ValueError: what `jax.jvp` raises.

    The same as `jax.jvp` inside `with jaxgrad.forward_mode():`, which is there for the other transformations.

    Example:
      >>> y, slope = jaxgrad.jvp(lambda w: jaxgrad.conv_general_dilated(x, w, (1, 1), "SAME"), (w,), (direction,))
    """
    with forward_mode():
        return jax.jvp(fun, primals, tangents, has_aux=has_aux)


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


def call(op: Callable[..., Any], rules: Rules, spec: Any, *arrays: Any) -> Any:
    """`op(spec, *arrays)`, which has both modes where the switch is on; spec must be hashable."""
    if not _switch.value:
        try:
            return op(spec, *arrays)
        except TypeError as error:
            if "forward-mode" in str(error):
                error.add_note(_HINT)
            raise
    leaves, tree = jax.tree.flatten(arrays)
    value = _Value(op, rules, spec, tree)
    results = _bind(value, *leaves)
    return jax.tree.unflatten(jax.tree.structure(_traced(value, *leaves).out_info), results)


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
class _Value(Map):
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
        if isinstance(self.of, _Value) and self.of.rules.tangent is not None:
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
        formula = None if isinstance(self.of, _Value) else self.of.formula()
        return self._pulled(formula or self.of, arrays)

    def formula(self):
        if isinstance(self.of, _Value) and (gradient := self.of.rules.gradient) is not None:
            return partial(self._by_rule, gradient, self.of)
        formula = self.of.formula()
        return None if formula is None else lambda *arrays: self._pulled(formula, arrays)

    def _by_rule(self, gradient: Callable[..., Any], value: _Value, *arrays: jax.Array) -> Any:
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
class _Batched(Map):
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
        return _Batched(self.of.differentiated(), self.axes, self.size)

    def push(self, wanted):
        return _Batched(self.of.push(wanted), self.axes + (0,) * len(wanted), self.size)

    def transposed(self, wanted, given):
        kept = self.axes[: len(self.axes) - self.linear]
        return _Batched(self.of.transposed(wanted, given), kept + (0,) * len(given), self.size)

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


# --- the primitive ------------------------------------------------------------------------------------------------

_call_p = Primitive("jaxgrad_call")
_call_p.multiple_results = True
_run = jax.jit(lambda map_, *arrays: map_(*arrays), static_argnums=0)


def _traced(map_: Map, *arrays: Any) -> Any:
    return _run.trace(map_, *arrays)


def _bind(map_: Map, *arrays: jax.Array) -> list[jax.Array]:
    # With the jaxpr among its parameters, JAX sees the shapes, and whatever else it looks for, inside the call.
    return _call_p.bind(*arrays, map_=map_, jaxpr=_traced(map_, *arrays).jaxpr)


@_call_p.def_impl
def _impl(*arrays, map_, jaxpr):
    return jax.tree.leaves(_run(map_, *arrays))


@_call_p.def_abstract_eval
def _abstract_eval(*avals, map_, jaxpr):
    return jaxpr.out_avals


def _jvp_rule(primals, tangents, *, map_, jaxpr):
    count = len(primals) - map_.linear
    wanted = tuple(i for i, t in enumerate(tangents[:count]) if not isinstance(t, ad.Zero))
    directions, linear = [map_.tangent_operand(i, tangents[i]) for i in wanted], tangents[count:]
    terms = []
    if wanted:
        terms.append(_bind(map_.push(wanted), *primals, *directions))
    if not all(isinstance(t, ad.Zero) for t in linear):
        terms.append(_bind(map_, *primals[:count], *map(ad.instantiate_zeros, linear)))
    return _bind(map_.differentiated(), *primals), [sum(parts[1:], parts[0]) for parts in zip(*terms, strict=True)]


def _transpose_rule(cotangents, *arrays, map_, jaxpr):
    count = len(arrays) - map_.linear
    wanted = tuple(i for i, a in enumerate(arrays[count:]) if ad.is_undefined_primal(a))
    given = tuple(i for i, c in enumerate(cotangents) if not isinstance(c, ad.Zero))
    found = _bind(map_.transposed(wanted, given), *arrays[:count], *(cotangents[i] for i in given))
    gradients = [None] * len(arrays)
    for i, gradient in zip(wanted, found, strict=True):
        gradients[count + i] = gradient
    return gradients


def _batch_rule(arrays, axes, *, map_, jaxpr):
    size = next(a.shape[axis] for a, axis in zip(arrays, axes, strict=True) if axis is not None)
    count = len(arrays) - map_.linear
    operands, mapped = [], []
    for i, (array, axis) in enumerate(zip(arrays, axes, strict=True)):
        if axis is not None:
            array = jnp.moveaxis(array, axis, 0)
        elif i >= count:
            array = jnp.broadcast_to(array, (size, *array.shape))
        operands.append(array)
        mapped.append(None if axis is None and i < count else 0)
    results = _bind(_Batched(map_, tuple(mapped), size), *operands)
    return results, [0] * len(results)


def _lowered(*arrays, map_, jaxpr):
    return jaxpr_as_fun(jaxpr)(*arrays)


ad.primitive_jvps[_call_p] = _jvp_rule
ad.primitive_transposes[_call_p] = _transpose_rule
batching.primitive_batchers[_call_p] = _batch_rule
mlir.register_lowering(_call_p, mlir.lower_fun(_lowered, multiple_results=True))
