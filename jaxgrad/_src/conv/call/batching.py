"""`vmap` of the convolution passes: folds the mapped axis, or keeps it as an axis of independent problems.

If all operands of a pass are mapped, the pass is called with an axis of independent problems before the axes of each
array. A mesh may split that axis as it splits a batch. The CPU kernels take the axis as it is; for the others the
problems become groups of one convolution.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jaxgrad._src.conv.call.params import ConvParams
from jaxgrad._src.run.batching import broadcast, fold, unfold


def as_independent_problems(
    pass_of: Callable[[ConvParams], Callable[..., Any]],
    params: ConvParams,
    size: int,
    is_mapped: Sequence[bool | None],
    arrays: Sequence[Any],
) -> tuple[Any, Any]:
    """A batching rule of every pass: one call whose axis of independent problems is, or contains, the mapped axis."""
    arrays = [None if a is None else broadcast(a, here, size) for a, here in zip(arrays, is_mapped, strict=True)]
    batched_pass = pass_of(dataclasses.replace(params, batched=True))
    if params.batched:
        results = batched_pass(*(None if a is None else fold(a, 0) for a in arrays))
        results = jax.tree.map(lambda r: unfold(r, 0, size), results)
    else:
        results = batched_pass(*arrays)
    return results, jax.tree.map(lambda _: True, results)


def as_groups(
    params: ConvParams,
    call_of: Callable[[ConvParams], Callable[..., Any]],
    operand_axes: Sequence[int],
    result_axes: Any,
) -> Callable[..., Any]:
    """Returns a call in which independent problems become groups of one convolution.

    Args:
      params: the parameters of the pass, with `batched`.
      call_of: returns the call for given parameters.
      operand_axes: the feature axis of each operand that is divided into groups.
      result_axes: the same for the results, as a tree of their structure.
    """

    def call(*arrays):
        size = arrays[0].shape[0]
        grouped = call_of(params.in_groups(size))
        folded = (None if a is None else fold(a, axis) for a, axis in zip(arrays, operand_axes, strict=True))
        return jax.tree.map(lambda result, axis: unfold(result, axis, size), grouped(*folded), result_axes)

    return call
