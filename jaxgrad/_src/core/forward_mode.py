"""Forward mode: the switch, and the primitive that the ops become under it.

A `jax.custom_vjp` has no forward mode, so under the switch an op is a call of `_call_p` instead. That primitive carries
a `Map` of `_forward_maps`, a function of arrays, and its rules never look inside: its derivative is a call of another
map.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir

from jaxgrad._forward_maps import Batched, Map, Rules, Value

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
    value = Value(op, rules, spec, tree)
    results = _bind(value, *leaves)
    return jax.tree.unflatten(jax.tree.structure(_traced(value, *leaves).out_info), results)


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
    results = _bind(Batched(map_, tuple(mapped), size), *operands)
    return results, [0] * len(results)


def _lowered(*arrays, map_, jaxpr):
    return jaxpr_as_fun(jaxpr)(*arrays)


ad.primitive_jvps[_call_p] = _jvp_rule
ad.primitive_transposes[_call_p] = _transpose_rule
batching.primitive_batchers[_call_p] = _batch_rule
mlir.register_lowering(_call_p, mlir.lower_fun(_lowered, multiple_results=True))
