"""`vmap` of a kernel call: folds the mapped axis into the batch. Where the weights are mapped, it loops over the axis,
or makes it an axis of groups."""

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

    def loop(size: int, is_mapped: Sequence[bool | None], args: Sequence[Any]) -> Any:
        def one(i: jax.Array) -> Any:
            return mapped(*(arg[i] if here else arg for arg, here in zip(args, is_mapped, strict=True)))

        results = lax.map(one, jnp.arange(size))
        return results, jax.tree.map(lambda _: True, results)

    @mapped.def_vmap
    def rule(axis_size: int, is_mapped: Sequence[bool | None], *args: Any) -> Any:
        if axis_size == 0:
            return empty_vmap(mapped, is_mapped, args)
        if foldable and not _weights_mapped(is_mapped, in_axes):
            return folded(mapped, in_axes, out_axes, axis_size, is_mapped, args)
        return loop(axis_size, is_mapped, args)

    return mapped


def fold_or_group(
    call: Callable[..., Any],
    of_groups: Callable[..., Any],
    in_axes: tuple[BatchAxis, ...],
    out_axes: tuple[BatchAxis, ...],
    *,
    of_examples: Callable[..., Any] | None = None,
) -> Callable[..., Any]:
    """Returns `call` with a batching rule that never loops.

    Args:
      of_groups: computes `call` for arrays that all have a first axis of groups.
      call, in_axes, out_axes: as in `fold_or_loop`.
      of_examples: given if a result of `call` sums over the batch, so that the mapped axis cannot be folded into it.
        Computes `call` for arrays with a first axis of examples, which share the operands that have no batch.
    """
    mapped, grouped = custom_vmap(call), custom_vmap(of_groups)
    shared = None if of_examples is None else _sharing_weights(of_examples, grouped, in_axes, len(out_axes))

    @mapped.def_vmap
    def rule(axis_size: int, is_mapped: Sequence[bool | None], *args: Any) -> Any:
        if axis_size == 0:
            return empty_vmap(mapped, is_mapped, args)
        if _weights_mapped(is_mapped, in_axes):
            return _all_mapped(grouped(*_broadcast_all(axis_size, is_mapped, args)))
        if shared is None:
            return folded(mapped, in_axes, out_axes, axis_size, is_mapped, args)
        as_examples = [axis is None or here for here, axis in zip(is_mapped, in_axes, strict=True)]
        return _all_mapped(shared(*_broadcast_all(axis_size, as_examples, args)))

    def behind_groups(axes: tuple[BatchAxis, ...]) -> tuple[BatchAxis, ...]:
        return tuple(None if axis is None else axis + 1 for axis in axes)

    @grouped.def_vmap
    def rule_of_groups(axis_size: int, is_mapped: Sequence[bool | None], *args: Any) -> Any:
        if axis_size == 0:
            return empty_vmap(grouped, is_mapped, args)
        ins, outs = behind_groups(in_axes), behind_groups(out_axes)
        if shared is not None or _weights_mapped(is_mapped, ins):
            ins, outs = (0,) * len(ins), (0,) * len(outs)
        return folded(grouped, ins, outs, axis_size, is_mapped, args)

    return mapped


def _sharing_weights(
    of_examples: Callable[..., Any], grouped: Callable[..., Any], in_axes: tuple[BatchAxis, ...], num_results: int
) -> Callable[..., Any]:
    """Returns `of_examples` of `fold_or_group` with a batching rule."""
    shared = custom_vmap(of_examples)
    axes = tuple(None if axis is None else 0 for axis in in_axes)

    def examples_as_groups(*args: Any) -> Any:
        size = next(arg.shape[0] for arg, axis in zip(args, axes, strict=True) if arg is not None and axis == 0)
        return grouped(*_broadcast_all(size, [axis == 0 for axis in axes], args))

    @shared.def_vmap
    def rule(axis_size: int, is_mapped: Sequence[bool | None], *args: Any) -> Any:
        if axis_size == 0:
            return empty_vmap(shared, is_mapped, args)
        if _weights_mapped(is_mapped, in_axes):
            mapped_axes = tuple(0 if here else None for here in is_mapped)
            return _all_mapped(jax.vmap(examples_as_groups, mapped_axes)(*args))
        return folded(shared, axes, (0,) * num_results, axis_size, is_mapped, args)

    return shared


def _all_mapped(results: Any) -> tuple[Any, Any]:
    """The results of a batching rule all of which have the mapped axis."""
    return results, jax.tree.map(lambda _: True, results)


def _broadcast_all(size: int, is_mapped: Sequence[bool | None], args: Sequence[Any]) -> list[Any]:
    """Returns the arrays with the mapped axis first. None stays None."""
    return [arg if arg is None else broadcast(arg, here, size) for arg, here in zip(args, is_mapped, strict=True)]


def _weights_mapped(is_mapped: Sequence[bool | None], in_axes: tuple[BatchAxis, ...]) -> bool:
    return any(here for here, axis in zip(is_mapped, in_axes, strict=True) if axis is None)


def folded(
    call: Callable[..., Any],
    in_axes: tuple[BatchAxis, ...],
    out_axes: tuple[BatchAxis, ...],
    size: int,
    is_mapped: Sequence[bool | None],
    args: Sequence[Any],
) -> Any:
    """The results of a batching rule that folds the mapped axis into an axis of each operand."""
    operands = (
        arg if arg is None or axis is None else fold(broadcast(arg, here, size), axis)
        for arg, axis, here in zip(args, in_axes, is_mapped, strict=True)
    )
    results = [
        result if result is None or axis is None else unfold(result, axis, size)
        for result, axis in zip(call(*operands), out_axes, strict=True)
    ]
    batched = [None if r is None else axis is not None for r, axis in zip(results, out_axes, strict=True)]
    return tuple(results), tuple(batched)


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
