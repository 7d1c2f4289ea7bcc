"""The passes of pooling: jitted, batched and partitioned calls of the selected implementation.

`vmap` folds a mapped axis into the first axis of the batch. A mesh may split the batch and the channels. A pass without
elements runs on XLA.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax

from jaxgrad._src.choice.candidates import Candidates
from jaxgrad._src.choice.selection import supporting
from jaxgrad._src.core.jax_internals import cleared_lru_cache
from jaxgrad._src.pool import xla
from jaxgrad._src.pool.backends import BACKENDS
from jaxgrad._src.pool.params import PoolParams, PoolProblem
from jaxgrad._src.run.batching import fold_or_loop
from jaxgrad._src.run.named_jit import named_jit
from jaxgrad._src.run.partitioning import Dims, PartitioningRule, partitioned

_MAX_PASSES = 1024  # jitted passes that are kept, for different parameters
_METHODS = {"max_pool": "max", "avg_pool": "sum"}  # of backends, before the names of passes


def run(params: PoolParams, pass_name: str, *operands: jax.Array) -> jax.Array:
    """Runs a pass of the op."""
    return _pass(params, pass_name, len(operands))(*operands)[0]


@cleared_lru_cache(_MAX_PASSES)
def _pass(params: PoolParams, pass_name: str, num_operands: int) -> Callable[..., Any]:
    """Returns a pass, from its operands to a tuple with its result."""
    name = f"{_METHODS[params.op]}_{pass_name}"

    def as_tuple(function: Callable[..., jax.Array], *operands: jax.Array) -> tuple[jax.Array]:
        return (function(params, *operands),)

    kernels = {b.implementation: partial(as_tuple, getattr(b, name)) for b in BACKENDS}
    on_xla = partial(as_tuple, getattr(xla, name))

    def candidates(first: jax.Array, *_: jax.Array) -> Candidates:
        return candidates_of(params, pass_name, params.problem(first))

    def call(*operands: jax.Array) -> Any:
        dims = _dims(params, operands[0].ndim)
        rule = PartitioningRule((dims,) * num_operands, (dims,))
        return partitioned(rule, candidates, kernels, on_xla)(*operands)

    batched = fold_or_loop(call, in_axes=(0,) * num_operands, out_axes=(0,))
    return named_jit(batched, f"{params.op}_{pass_name}", params)


def candidates_of(params: PoolParams, pass_name: str, problem: PoolProblem) -> Candidates:
    """Returns the candidates for the operands of a pass, whose batch `vmap` or a mesh may have changed."""
    candidates = params.candidates_of(pass_name)
    return supporting(candidates, BACKENDS, pass_name, problem) if problem.size else candidates.on_xla()


def _dims(params: PoolParams, ndim: int) -> Dims:
    """Names the dimensions of x that a mesh may split: the batch and the channels."""
    *names, channels = params.window.of_all_axes((None,) * params.window.ndim, "other", ndim)
    return tuple(None if name is None else f"{name}{axis}" for axis, name in enumerate((*names, channels)))
