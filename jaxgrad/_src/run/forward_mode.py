"""Forward mode: the context manager that switches it on, and the primitive that an op becomes inside it.

A `jax.custom_vjp` function has no forward mode. Inside the context an op is a call of the primitive `_call_p` instead,
whose parameter is a `Map` of `derivative_maps`. The derivative of a call is a call with another map.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar, overload

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir

from jaxgrad._src.choice.settings import forward_mode_enabled
from jaxgrad._src.core.decorator import Decorator
from jaxgrad._src.run.derivative_maps import Batched, JvpRules, Map, Primal

_HINT = "jaxgrad's ops support forward mode inside `with jaxgrad.forward_mode():`; see docs/forward_mode.md."


_Function = TypeVar("_Function", bound=Callable[..., Any])


class ForwardMode(Decorator):
    """The context manager of `jaxgrad.forward_mode`."""

    name = "jaxgrad.forward_mode"

    def _new_context(self) -> contextlib.AbstractContextManager[Any]:
        return forward_mode_enabled(True)


@overload
def forward_mode(function: _Function, /) -> _Function: ...
@overload
def forward_mode(function: None = None, /) -> ForwardMode: ...


def forward_mode(function: Any = None, /) -> Any:
    """Enables forward-mode differentiation of jaxgrad's ops inside a `with` block, or in a decorated function.

    `jax.jvp`, `jax.linearize`, `jax.jacfwd` and `jax.hessian` then work on every op, and forward and reverse mode nest
    to any order. Outside the block the ops are `jax.custom_vjp` functions, for which JAX raises "can't apply
    forward-mode autodiff (jvp) to a custom_vjp function".

    The block must contain the call of the differentiating transformation. Functions under `jax.jit` are traced again
    inside the block. Values and gradients come from the same kernels inside and outside. docs/forward_mode.md lists
    what the tangents of each op run on, and what reverse mode costs inside the block.

    Args:
      function: the function to decorate. Without it, the result is a context manager, which is a decorator too.

    Returns:
      The decorated function, or the context manager, which is for the thread that enters it and may be entered again.

    Raises:
      TypeError: function is not callable, or it is a class, a generator function or a coroutine function.

    Examples:
      >>> x, w = jnp.ones((2, 3, 8, 8)), jnp.ones((4, 3, 3, 3))
      >>> loss = lambda w: (jaxgrad.conv_general_dilated(x, w, (1, 1), "SAME") ** 2).mean()
      >>> with jaxgrad.forward_mode():
      ...     value, slope = jax.jvp(loss, (w,), (w,))
      ...     _, hessian_times_w = jax.jvp(jax.grad(loss), (w,), (w,))
      >>> hessian_times_w.shape
      (4, 3, 3, 3)
    """
    return ForwardMode() if function is None else ForwardMode()(function)


def jvp(
    fun: Callable[..., Any], primals: Sequence[Any], tangents: Sequence[Any], has_aux: bool = False
) -> tuple[Any, ...]:
    """`jax.jvp` inside `jaxgrad.forward_mode()`: the value of `fun` and its derivative along `tangents`.

    Args:
      fun: a function that may call jaxgrad's ops, with one positional argument for each primal.
      primals: the arguments at which `fun` is differentiated: arrays or pytrees of arrays.
      tangents: the direction, with the structure, shapes and dtypes of `primals`.
      has_aux: whether `fun` returns a pair whose second element is not differentiated.

    Returns:
      `(value, tangent)`, or `(value, tangent, aux)` with `has_aux`.

    Raises:
      TypeError, ValueError: the errors of `jax.jvp`.

    Examples:
      >>> x, w = jnp.ones((2, 3, 8, 8)), jnp.ones((4, 3, 3, 3))
      >>> y, slope = jaxgrad.jvp(lambda w: jaxgrad.conv_general_dilated(x, w, (1, 1), "SAME"), (w,), (w,))
      >>> slope.shape
      (2, 4, 8, 8)
    """
    with forward_mode():
        return jax.jvp(fun, primals, tangents, has_aux=has_aux)


def call(op: Callable[..., Any], rules: JvpRules, params: Any, *arrays: Any) -> Any:
    """Calls `op(params, *arrays)`, with forward mode inside the context; `params` must be hashable."""
    if not forward_mode_enabled.value:
        with _with_hint():
            try:
                # JAX raises some errors when it lowers or runs the program. Their tracebacks show the next line.
                return op(params, *arrays)  # for forward mode: with jaxgrad.forward_mode(), see docs/forward_mode.md
            except NotImplementedError as error:
                if "symbolic_zeros" not in str(error):
                    raise
            # JAX has no `custom_vjp` with symbolic zeros in a `shard_map` that runs op by op. Under `jax.jit` it has.
            with jax.disable_jit(False):
                return _call_in_jit(op, params, *arrays)
    leaves, tree = jax.tree.flatten(arrays)
    primal = Primal(op, rules, params, tree)
    results = _bind(primal, *leaves)
    return jax.tree.unflatten(jax.tree.structure(_traced(primal, *leaves).out_info), results)


@contextlib.contextmanager
def _with_hint() -> Iterator[None]:
    """Adds to JAX's error for forward mode how it is switched on."""
    try:
        yield
    except TypeError as error:
        if "forward-mode" in str(error):
            error.add_note(_HINT)
        raise


_call_in_jit = jax.jit(lambda op, params, *arrays: op(params, *arrays), static_argnums=(0, 1))
_call_p = Primitive("jaxgrad_call")
_call_p.multiple_results = True
_run = jax.jit(lambda map_, *arrays: map_(*arrays), static_argnums=0)


def _traced(map_: Map, *arrays: Any) -> Any:
    return _run.trace(map_, *arrays)


def _bind(map_: Map, *arrays: jax.Array) -> list[jax.Array]:
    # The jaxpr is a parameter so that JAX can look into the call, for instance for effects and shapes.
    return _call_p.bind(*arrays, map_=map_, jaxpr=_traced(map_, *arrays).jaxpr)


@_call_p.def_impl
def _impl(*arrays, map_, jaxpr):
    return jax.tree.leaves(_run(map_, *arrays))


@_call_p.def_abstract_eval
def _abstract_eval(*avals, map_, jaxpr):
    return jaxpr.out_avals


def _jvp_rule(primals, tangents, *, map_, jaxpr):
    count = len(primals) - map_.linear
    needed = tuple(i for i, t in enumerate(tangents[:count]) if not isinstance(t, ad.Zero))
    directions, linear = [map_.tangent_operand(i, tangents[i]) for i in needed], tangents[count:]
    terms = []
    if needed:
        terms.append(_bind(map_.jvp_map(needed), *primals, *directions))
    if not all(isinstance(t, ad.Zero) for t in linear):
        terms.append(_bind(map_, *primals[:count], *map(ad.instantiate_zeros, linear)))
    return _bind(map_.differentiated(), *primals), [sum(parts[1:], parts[0]) for parts in zip(*terms, strict=True)]


def _transpose_rule(cotangents, *arrays, map_, jaxpr):
    count = len(arrays) - map_.linear
    needed = tuple(i for i, a in enumerate(arrays[count:]) if ad.is_undefined_primal(a))
    given = tuple(i for i, c in enumerate(cotangents) if not isinstance(c, ad.Zero))
    found = _bind(map_.transposed(needed, given), *arrays[:count], *(cotangents[i] for i in given))
    gradients: list[Any] = [None] * len(arrays)
    for i, gradient in zip(needed, found, strict=True):
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
    results = _bind(Batched(map_, tuple(mapped), size), *operands)
    return results, [0] * len(results)


def _lowered(*arrays, map_, jaxpr):
    return jaxpr_as_fun(jaxpr)(*arrays)


ad.primitive_jvps[_call_p] = _jvp_rule
ad.primitive_transposes[_call_p] = _transpose_rule
batching.primitive_batchers[_call_p] = _batch_rule
mlir.register_lowering(_call_p, mlir.lower_fun(_lowered, multiple_results=True))
