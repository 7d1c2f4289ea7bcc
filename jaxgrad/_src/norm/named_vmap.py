"""Batch statistics over a named axis of `vmap`, as in `jax.vmap(layer, axis_name="batch")`.

The call is a primitive until `vmap` reaches it. The batching rule then knows which axis is mapped:

  an axis that the call names   becomes one more axis of the batch, and the statistics have no mapped axis.
  another axis                  joins the channels, which are independent of each other.

A derivative that is taken inside the `vmap` is that of the textbook formula on XLA. JAX differentiates its collectives.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching

from jaxgrad._src.norm import jvp
from jaxgrad._src.norm.params import NormParams, TrainingOptions
from jaxgrad._src.run.batching import broadcast, fold, unfold

Train = Callable[..., tuple[jax.Array, jax.Array, jax.Array]]

_training_p = Primitive("jaxgrad_batch_norm_training")
_training_p.multiple_results = True


def training(train: Train, options: TrainingOptions, *arrays: jax.Array | None) -> tuple[jax.Array, ...]:
    """A call with statistics over axes of `vmap`.

    Args:
      train: the call without axes of `vmap`: `(options, x, scale, bias, residual) -> (y, mean, var)`.
      options: the static arguments.
      *arrays: x, scale, bias and residual, which may be None.
    """
    given = [array for array in arrays if array is not None]
    if not options.vmap_axes:
        return train(options, *arrays)
    without_vmap = dataclasses.replace(options, vmap_axes=())  # inside `shard_map`, JAX refuses sums over axes of vmap
    avals = jax.make_jaxpr(partial(_formula, without_vmap))(*given).out_avals
    return tuple(_training_p.bind(*given, train=train, options=options, avals=tuple(avals)))


@dataclasses.dataclass(frozen=True)
class _FormulaParams(NormParams):
    vmap_axes: tuple[str, ...] = ()

    def pmean(self, arrays: Any) -> Any:
        return super().pmean(lax.pmean(arrays, self.vmap_axes) if self.vmap_axes else arrays)


def _formula(
    options: TrainingOptions, x: jax.Array, scale: jax.Array, bias: jax.Array, residual: jax.Array | None = None
) -> Any:
    """Returns `(y, mean, var)` in plain JAX, with collectives over all axes."""
    names = ("feature_axis", "epsilon", "activation", "statistics_dtype", "mesh_axes", "vmap_axes")
    settings = {name: getattr(options, name) for name in names}
    params = _FormulaParams("batch_norm_training", **settings)
    return jvp.training_formula(params, x, scale, bias, residual)


@_training_p.def_abstract_eval
def _abstract_eval(*_, train, options, avals):
    return avals


def _batch_rule(axis, arrays, dims, *, train, options, avals):
    mapped = any(dim is not None for dim in dims)
    if axis.name not in options.vmap_axes:
        if not mapped:
            return _call(train, options, arrays), (None,) * 3
        return _joined_to_channels(train, options, axis.size, arrays, dims)
    rest = dataclasses.replace(options, vmap_axes=tuple(name for name in options.vmap_axes if name != axis.name))
    x, scale, bias, *residual = arrays
    if not mapped:  # the statistics of equal examples are those of one
        one = (x[None], scale, bias, *(a[None] for a in residual))
        (y, *statistics), _ = _joined_to_batch(train, rest, 1, one, (0, None, None, *(0 for _ in residual)))
        return (y[0], *statistics), (None,) * 3
    if dims[1] is None and dims[2] is None:
        return _joined_to_batch(train, rest, axis.size, arrays, dims)
    # Each example has its own scale or bias.
    out_dims = (0, None, None)
    formula = jax.vmap(partial(_formula, options), dims, out_dims, axis_name=axis.name, axis_size=axis.size)
    return formula(*arrays), out_dims


def _call(train: Train, options: TrainingOptions, arrays: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
    return training(train, options, *arrays, *(None,) * (4 - len(arrays)))


def _joined_to_batch(train, options, size, arrays, dims):
    """The mapped axis stays where it is in x, as an axis of the batch."""
    x, scale, bias, *residual = arrays
    dim = next(d for d in dims if d is not None)
    x, *residual = (
        jnp.broadcast_to(jnp.expand_dims(a, dim), (*a.shape[:dim], size, *a.shape[dim:]))
        if d is None
        else jnp.moveaxis(a, d, dim)
        for a, d in zip((x, *residual), (dims[0], *dims[3:]), strict=True)
    )
    feature_axis = options.feature_axis + (dim <= options.feature_axis)
    options = dataclasses.replace(options, feature_axis=feature_axis)
    return _call(train, options, (x, scale, bias, *residual)), (dim, None, None)


def _joined_to_channels(train, options, size, arrays, dims):
    axis = options.feature_axis
    axes = (axis, 0, 0, axis)[: len(arrays)]
    first = (a if d is None else jnp.moveaxis(a, d, 0) for a, d in zip(arrays, dims, strict=True))
    every = (broadcast(a, d is not None, size) for a, d in zip(first, dims, strict=True))
    results = _call(train, options, [fold(a, at) for a, at in zip(every, axes, strict=True)])
    return [unfold(r, at, size) for r, at in zip(results, axes, strict=False)], (0, 0, 0)


def _jvp_rule(primals, tangents, *, train, options, avals):
    return jax.jvp(partial(_formula, options), tuple(primals), tuple(map(ad.instantiate_zeros, tangents)))


batching.fancy_primitive_batchers[_training_p] = _batch_rule
ad.primitive_jvps[_training_p] = _jvp_rule
