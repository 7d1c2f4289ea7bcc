"""The passes of batch normalization: jitted, batched and partitioned calls of the selected implementation.

Every operand and result has the channel axis, and channels are independent of each other: `vmap` folds a mapped axis
into the channels, which takes one call and is exact. A pass without elements, or without a cotangent to read, runs on
XLA.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax

from jaxgrad._src.batch_norm import cross_device, xla
from jaxgrad._src.batch_norm.backend import Statistics
from jaxgrad._src.batch_norm.backends import BACKENDS, TWO_STEP_BACKENDS
from jaxgrad._src.batch_norm.params import BatchNormParams, BatchNormProblem
from jaxgrad._src.choice.candidates import Candidates
from jaxgrad._src.choice.selection import supporting
from jaxgrad._src.core.jax_internals import cleared_lru_cache
from jaxgrad._src.run.batching import fold_or_loop
from jaxgrad._src.run.lowering import platform_call
from jaxgrad._src.run.mesh_axes import MeshAxes
from jaxgrad._src.run.named_jit import named_jit
from jaxgrad._src.run.partitioning import Dims, PartitioningRule, partitioned

_CHANNELS: Dims = ("C",)
_MAX_PASSES = 1024  # jitted passes of each kind that are kept, for different parameters


@cleared_lru_cache(_MAX_PASSES)
def forward(params: BatchNormParams) -> Callable[..., Any]:
    """Returns (x, scale, bias, residual) -> (y, mean, mean_low, var, rstd); residual may be None."""
    axis = params.feature_axis
    kernels = {b.implementation: partial(b.forward, params) for b in BACKENDS}

    def candidates(x, scale, bias, residual):
        return candidates_of(params, "forward", params.problem(x))

    def over_devices(mesh_axes: MeshAxes) -> Callable[..., Any]:
        local_statistics = partial(_local_statistics, params)
        return partial(cross_device.forward, params, mesh_axes, local_statistics, normalize(params))

    def call(x, *rest):
        if params.mesh_axes is not None:
            return over_devices(params.mesh_axes)(x, *rest)
        like_x = _dims(params, x)
        rule = PartitioningRule(
            (like_x, _CHANNELS, _CHANNELS, like_x), (like_x, *[_CHANNELS] * 4), _reduced_dims(params, x)
        )
        run = partitioned(rule, candidates, kernels, partial(xla.forward, params), over_devices, lambda *_: True)
        return run(x, *rest)

    batched = fold_or_loop(call, in_axes=(axis, 0, 0, axis), out_axes=(axis, 0, 0, 0, 0))
    return named_jit(batched, "batch_norm_forward", params)


@cleared_lru_cache(_MAX_PASSES)
def normalize(params: BatchNormParams) -> Callable[..., Any]:
    """Returns (x, scale, bias, mean, mean_low, rstd, residual) -> (y,); mean_low and residual may be None."""
    axis = params.feature_axis

    def flat(step: Callable[..., Any]) -> Callable[..., Any]:
        def run(x, scale, bias, mean, mean_low, rstd, residual):
            return (step(params, x, scale, bias, Statistics(mean, mean_low, rstd), residual),)

        return run

    kernels = {b.implementation: flat(b.normalize) for b in TWO_STEP_BACKENDS}

    def call(x, *rest):
        like_x = _dims(params, x)
        rule = PartitioningRule((like_x, *[_CHANNELS] * 5, like_x), (like_x,))
        return partitioned(
            rule,
            lambda x, *_: candidates_of(params, "forward", params.problem(x), in_steps=True),
            kernels,
            flat(xla.normalize),
        )(x, *rest)

    batched = fold_or_loop(call, in_axes=(axis, 0, 0, 0, 0, 0, axis), out_axes=(axis,))
    return named_jit(batched, "batch_norm_normalize", params)


@cleared_lru_cache(_MAX_PASSES)
def backward(params: BatchNormParams, needs_grad: tuple[bool, ...]) -> Callable[..., Any]:
    """Returns (x, scale, bias, mean, mean_low, rstd, y, dy, dmean, dvar) -> (dx, dscale, dbias, dresidual).

    bias is an array where relu was applied without a residual, and y where it was applied with one; otherwise both are
    None. mean_low, dy, dmean and dvar may be None. A gradient that is not needed is None.
    """
    axis = params.feature_axis

    def flat(pass_: Callable[..., Any]) -> Callable[..., Any]:
        def run(x, scale, bias, mean, mean_low, rstd, *rest):
            statistics = Statistics(mean, mean_low, rstd)
            return tuple(pass_(params, x, scale, bias, statistics, *rest, needs_grad=needs_grad))

        return run

    kernels = {b.implementation: flat(b.backward) for b in BACKENDS}

    def candidates(x, scale, bias, mean, mean_low, rstd, y, dy, dmean, dvar):
        if dy is None or not any(needs_grad):
            return params.backward_candidates.on_xla()
        return candidates_of(params, "backward", params.problem(x), needs_grad)

    def over_devices(mesh_axes: MeshAxes) -> Callable[..., Any]:
        return partial(cross_device.backward, params, mesh_axes, partial(_local_sums, params), needs_grad)

    def call(x, *rest):
        if params.mesh_axes is not None:
            return over_devices(params.mesh_axes)(x, *rest)
        like_x = _dims(params, x)
        results = (like_x, _CHANNELS, _CHANNELS, like_x)
        rule = PartitioningRule(
            (like_x, *[_CHANNELS] * 5, like_x, like_x, _CHANNELS, _CHANNELS),
            tuple(names if needed else None for names, needed in zip(results, needs_grad, strict=True)),
            _reduced_dims(params, x),
        )
        # XLA's partitioner would gather the terms of the sums.
        run = partitioned(
            rule, candidates, kernels, flat(xla.backward), None if params.frozen else over_devices, lambda *_: True
        )
        return run(x, *rest)

    in_axes = (axis, 0, 0, 0, 0, 0, axis, axis, 0, 0)
    batched = fold_or_loop(call, in_axes=in_axes, out_axes=(axis, 0, 0, axis))
    return named_jit(batched, "batch_norm_backward", params, needs_grad)


def two_step_candidates(candidates: Candidates) -> Candidates:
    """Returns the candidates that have kernels for the single steps.

    A forced implementation without such kernels still restricts the platform.
    """
    names = [backend.implementation for backend in TWO_STEP_BACKENDS]
    return dataclasses.replace(
        candidates, implementations=tuple(name for name in candidates.implementations if name in names)
    )


def candidates_of(
    params: BatchNormParams,
    pass_name: str,
    problem: BatchNormProblem,
    needs_grad: tuple[bool, ...] | None = None,
    *,
    in_steps: bool = False,
) -> Candidates:
    """Returns the candidates for the operands of a pass, which `vmap` may have made larger than those of the call.

    `needs_grad` says which gradients a backward pass computes, None all of them; `in_steps`, whether the pass needs the
    single steps.
    """
    candidates = params.forward_candidates if pass_name == "forward" else params.backward_candidates
    if problem.size == 0:
        return candidates.on_xla()
    candidates = supporting(candidates, BACKENDS, pass_name, problem)
    if needs_grad is not None and not needs_grad[0]:
        for backend in BACKENDS:
            if not backend.can_skip_dx:
                candidates = candidates.without(backend.implementation)
    return two_step_candidates(candidates) if in_steps else candidates


def _local_statistics(params: BatchNormParams, x: jax.Array) -> Any:
    """Returns (mean, mean_low, var, rstd) of one device's shard."""
    kernels = {b.implementation: partial(b.statistics, params) for b in TWO_STEP_BACKENDS}
    candidates = candidates_of(params, "forward", params.problem(x), in_steps=True)
    return platform_call(candidates, kernels, partial(xla.statistics, params), x)


def _local_sums(params: BatchNormParams, x: jax.Array, *rest: Any) -> Any:
    """The backward pass of one device's shard, of which only dscale and dbias are computed."""
    candidates = candidates_of(params, "backward", params.problem(x), in_steps=True)
    local = dataclasses.replace(params, backward_candidates=candidates, mesh_axes=None)
    return backward(local, (False, True, True, False))(x, *rest)


def _dims(params: BatchNormParams, x: jax.Array) -> Dims:
    """Names the dimensions of x. A mesh may split any of them: the channels, C, and the others."""
    return tuple("C" if axis == params.feature_axis else f"N{axis}" for axis in range(x.ndim))


def _reduced_dims(params: BatchNormParams, x: jax.Array) -> tuple[str, ...]:
    """The dimensions over which statistics and the gradients of [C] arrays are summed."""
    return tuple(name for name in _dims(params, x) if name is not None and name != "C")
