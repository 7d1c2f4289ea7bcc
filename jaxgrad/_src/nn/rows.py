"""Ops whose rows `vmap` adds to: the weight gradients of `grad` of a `vmap` are then sums over all rows.

An op alone, a `jax.custom_vjp` function, computes the weight gradients of each mapped example there, because JAX maps
its backward pass and sums the results. So the call is a primitive until `vmap` has gone by, and becomes the op where it
is differentiated or lowered.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir

from jaxgrad._src.convert.gru_weights import GRUWeights
from jaxgrad._src.gru.api import gru


@dataclasses.dataclass(frozen=True)
class _Call:
    """`function(weights, *arrays)` as a function of the leaves of the weights and of the arrays, which have rows.

    Attributes:
      function: returns a list of arrays with rows; hashed and compared by value.
      structure: that of the weights.
      in_axes, out_axes: the axis of the rows in each array and in each result.
    """

    function: Callable[..., list[jax.Array]]
    structure: Any
    in_axes: tuple[int, ...]
    out_axes: tuple[int, ...]

    def __call__(self, *arrays: jax.Array) -> list[jax.Array]:
        count = self.structure.num_leaves
        return self.function(jax.tree.unflatten(self.structure, arrays[:count]), *arrays[count:])


def call_with_rows(
    function: Callable[..., list[jax.Array]],
    weights: Any,
    *arrays: jax.Array,
    in_axes: tuple[int, ...],
    out_axes: tuple[int, ...],
) -> list[jax.Array]:
    """`function(weights, *arrays)`, to whose rows `vmap` adds where it does not map the weights.

    The arguments are those of `_Call`; in_axes may have more axes than there are arrays.
    """
    leaves, structure = jax.tree.flatten(weights)
    return _bind(_Call(function, structure, in_axes, out_axes), *leaves, *arrays)


@dataclasses.dataclass(frozen=True)
class _GRU:
    reverse: bool

    def __call__(self, weights: GRUWeights, xs: jax.Array, init: jax.Array, *reset: jax.Array) -> list[jax.Array]:
        states, last = gru(
            xs,
            weights.w,
            weights.r,
            weights.b,
            initial_h=init[None],
            reset=reset[0] if reset else None,
            direction="reverse" if self.reverse else "forward",
            linear_before_reset=weights.linear_before_reset,
        )
        return [last[0], states[:, 0]]


def run_rows(
    weights: GRUWeights, xs: jax.Array, init: jax.Array, reset: jax.Array | None, reverse: bool, dtype: Any
) -> tuple[jax.Array, jax.Array]:
    """`(last [*batch, H], states [T, *batch, H])` of xs [T, *batch, I], init [*batch, H] and reset [T, *batch].

    One direction, computed in `dtype`.
    """
    (T, *batch, I), H = xs.shape, init.shape[-1]  # noqa: E741
    B = math.prod(batch)
    rows = [xs.astype(dtype).reshape(T, B, I), init.astype(dtype).reshape(B, H)]
    if reset is not None:
        rows.append(reset.reshape(T, B))
    weights = jax.tree.map(lambda leaf: leaf.astype(dtype), weights)
    last, states = call_with_rows(_GRU(reverse), weights, *rows, in_axes=(1, 0, 1), out_axes=(0, 1))
    return last.reshape(*batch, H), states.reshape(T, *batch, H)


_rows_p = Primitive("jaxgrad_rows")
_rows_p.multiple_results = True
_run = jax.jit(lambda call, *arrays: call(*arrays), static_argnums=0)


def _bind(call: _Call, *arrays: jax.Array) -> list[jax.Array]:
    return _rows_p.bind(*arrays, call=call, jaxpr=_run.trace(call, *arrays).jaxpr)


@_rows_p.def_impl
def _impl(*arrays, call, jaxpr):
    return _run(call, *arrays)


@_rows_p.def_abstract_eval
def _abstract_eval(*avals, call, jaxpr):
    return jaxpr.out_avals


def _jvp_rule(primals, tangents, *, call, jaxpr):
    needed = [i for i, t in enumerate(tangents) if not isinstance(t, ad.Zero)]

    def of_needed(*values):
        arrays = list(primals)
        for i, value in zip(needed, values, strict=True):
            arrays[i] = value
        return _run(call, *arrays)  # jitted, as `shard_map` outside `jit` requires

    return jax.jvp(of_needed, [primals[i] for i in needed], [tangents[i] for i in needed])


def _batch_rule(arrays, axes, *, call, jaxpr):
    count = call.structure.num_leaves
    if any(axis is not None for axis in axes[:count]):  # several weights: the op has kernels for groups
        return jax.vmap(call, axes)(*arrays), [0] * len(call.out_axes)
    size = next(a.shape[axis] for a, axis in zip(arrays, axes, strict=True) if axis is not None)
    folded = list(arrays[:count])
    for array, axis, rows in zip(arrays[count:], axes[count:], call.in_axes, strict=False):
        if axis is None:
            array, axis = jnp.broadcast_to(array, (size, *array.shape)), 0
        array = jnp.moveaxis(array, axis, rows)
        B = array.shape[rows + 1]
        folded.append(array.reshape(*array.shape[:rows], size * B, *array.shape[rows + 2 :]))
    results = _bind(call, *folded)
    split = [
        a.reshape(*a.shape[:rows], size, B, *a.shape[rows + 1 :])
        for a, rows in zip(results, call.out_axes, strict=True)
    ]
    return split, call.out_axes


ad.primitive_jvps[_rows_p] = _jvp_rule
batching.primitive_batchers[_rows_p] = _batch_rule
mlir.register_lowering(
    _rows_p, mlir.lower_fun(lambda *arrays, call, jaxpr: jaxpr_as_fun(jaxpr)(*arrays), multiple_results=True)
)
