"""A GRU whose rows `vmap` adds to: the weight gradients of `grad` of a `vmap` are then sums over all rows.

`jaxgrad.gru` alone, a `jax.custom_vjp` function, computes the weight gradient of each mapped example there, because JAX
maps its backward pass and sums the results. So the call is a primitive until `vmap` has gone by, and becomes the op
where it is differentiated or lowered.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir

from jaxgrad._src.convert.gru_weights import GRUWeights
from jaxgrad._src.gru.api import gru

# The axis of the rows in xs [T, B, I], init [B, H] and reset [T, B], and in the results: last [B, H], states [T, B, H].
_IN_AXES, _OUT_AXES = (1, 0, 1), (0, 1)


@dataclasses.dataclass(frozen=True)
class _Call:
    """The function of the leaves of the weights, xs, init and perhaps reset. `structure` is that of the weights."""

    structure: Any
    reverse: bool

    def __call__(self, *arrays: jax.Array) -> list[jax.Array]:
        count = self.structure.num_leaves
        weights: GRUWeights = jax.tree.unflatten(self.structure, arrays[:count])
        xs, init, *reset = arrays[count:]
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
    leaves, structure = jax.tree.flatten(weights)
    B = math.prod(batch)
    rows = [xs.astype(dtype).reshape(T, B, I), init.astype(dtype).reshape(B, H)]
    if reset is not None:
        rows.append(reset.reshape(T, B))
    last, states = _bind(_Call(structure, reverse), *(leaf.astype(dtype) for leaf in leaves), *rows)
    return last.reshape(*batch, H), states.reshape(T, *batch, H)


_rows_p = Primitive("jaxgrad_gru_rows")
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
        return jaxpr_as_fun(jaxpr)(*arrays)

    return jax.jvp(of_needed, [primals[i] for i in needed], [tangents[i] for i in needed])


def _batch_rule(arrays, axes, *, call, jaxpr):
    count = call.structure.num_leaves
    if any(axis is not None for axis in axes[:count]):  # several weights: the op has kernels for groups
        return jax.vmap(call, axes)(*arrays), [0, 0]
    size = next(a.shape[axis] for a, axis in zip(arrays, axes, strict=True) if axis is not None)
    folded = list(arrays[:count])
    for array, axis, rows in zip(arrays[count:], axes[count:], _IN_AXES, strict=False):
        if axis is None:
            array, axis = jnp.broadcast_to(array, (size, *array.shape)), 0
        array = jnp.moveaxis(array, axis, rows)
        B = array.shape[rows + 1]
        folded.append(array.reshape(*array.shape[:rows], size * B, *array.shape[rows + 2 :]))
    results = _bind(call, *folded)
    split = [a.reshape(*a.shape[:rows], size, B, a.shape[-1]) for a, rows in zip(results, _OUT_AXES, strict=True)]
    return split, _OUT_AXES


ad.primitive_jvps[_rows_p] = _jvp_rule
batching.primitive_batchers[_rows_p] = _batch_rule
mlir.register_lowering(
    _rows_p, mlir.lower_fun(lambda *arrays, call, jaxpr: jaxpr_as_fun(jaxpr)(*arrays), multiple_results=True)
)
