"""`vmap` of a kernel call: folds the mapped axis into the batch, or loops over it where the weights are mapped."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap

BatchAxis = int | None


def fold_or_loop(
    call: Callable[..., Any], in_axes: tuple[BatchAxis, ...], out_axes: tuple[BatchAxis, ...], *, foldable: bool = True
) -> Callable[..., Any]:
    """Returns `call` with a batching rule.

    Args:
      call: takes arrays or None, and returns a tuple of arrays or None.
      in_axes: for each operand the axis of the batch; None for an operand that the whole batch shares.
      out_axes: for each result the axis of the batch; None for a result without one.
      foldable: False if a result sums over the batch, so that the mapped axis cannot be folded into it.
    """
    mapped = custom_vmap(call)

    def folded(size: int, is_mapped: Sequence[bool | None], args: Sequence[Any]) -> Any:
        operands = (
            arg if arg is None or axis is None else fold(broadcast(arg, here, size), axis)
            for arg, axis, here in zip(args, in_axes, is_mapped, strict=True)
        )
        results = [
            result if result is None or axis is None else unfold(result, axis, size)
            for result, axis in zip(mapped(*operands), out_axes, strict=True)
        ]
        batched = [None if r is None else axis is not None for r, axis in zip(results, out_axes, strict=True)]
        return tuple(results), tuple(batched)

    def loop(size: int, is_mapped: Sequence[bool | None], args: Sequence[Any]) -> Any:
        def one(i: jax.Array) -> Any:
            return mapped(*(arg[i] if here else arg for arg, here in zip(args, is_mapped, strict=True)))

        results = lax.map(one, jnp.arange(size))
        return results, jax.tree.map(lambda _: True, results)

    @mapped.def_vmap
    def rule(axis_size: int, is_mapped: Sequence[bool | None], *args: Any) -> Any:
        if axis_size == 0:
            return empty_vmap(mapped, is_mapped, args)
        weights_mapped = any(here for here, axis in zip(is_mapped, in_axes, strict=True) if axis is None)
        return (loop if weights_mapped or not foldable else folded)(axis_size, is_mapped, args)

    return mapped


def empty_vmap(call: Callable[..., Any], is_mapped: Sequence[bool | None], args: Sequence[Any]) -> tuple[Any, Any]:
    """The results of a `vmap` over an axis of size 0, for a batching rule to return."""

    def one(arg: Any, mapped: bool | None) -> Any:
        return jax.ShapeDtypeStruct(arg.shape[1:], arg.dtype) if mapped else arg

    results = jax.eval_shape(call, *map(one, args, is_mapped))
    empty = jax.tree.map(lambda r: jnp.zeros((0, *r.shape), r.dtype), results)
    return empty, jax.tree.map(lambda _: True, results)


def broadcast(array: jax.Array, is_mapped: bool | None, size: int) -> jax.Array:
    """Returns the array with the mapped axis first, broadcast if it is not mapped."""
    return array if is_mapped else jnp.broadcast_to(array, (size, *array.shape))


def fold(array: jax.Array, axis: int) -> jax.Array:
    """Merges the first axis into `axis` of the others, as the slower-varying part."""
    array = jnp.moveaxis(array, 0, axis)
    return array.reshape(*array.shape[:axis], array.shape[axis] * array.shape[axis + 1], *array.shape[axis + 2 :])


def unfold(array: jax.Array, axis: int, size: int) -> jax.Array:
    """Splits `axis` into a first axis of `size` and the rest: the inverse of `fold`."""
    array = array.reshape(*array.shape[:axis], size, array.shape[axis] // size, *array.shape[axis + 1 :])
    return jnp.moveaxis(array, axis, 0)
