"""The passes of normalization: jitted, batched and partitioned calls of the selected implementation.

A pass takes and returns the arrays of one call, without an axis of calls. Inside, that axis is the first of every
array, and `vmap` makes it longer: one kernel call computes all. In the forward pass of an op with samples, examples
that share scale and bias become samples instead. A pass without elements, or without a cotangent to read, runs on XLA.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
from jax import lax
from jax.custom_batching import custom_vmap

from jaxgrad._src.choice.candidates import Candidates
from jaxgrad._src.choice.selection import supporting
from jaxgrad._src.core.jax_internals import cleared_lru_cache
from jaxgrad._src.norm import cross_device, xla
from jaxgrad._src.norm.backend import Statistics
from jaxgrad._src.norm.backends import BACKENDS, TWO_STEP_BACKENDS
from jaxgrad._src.norm.params import NormParams, NormProblem
from jaxgrad._src.run.batching import broadcast, empty_vmap, folded
from jaxgrad._src.run.lowering import platform_call
from jaxgrad._src.run.mesh_axes import MeshAxes
from jaxgrad._src.run.named_jit import named_jit
from jaxgrad._src.run.partitioning import PartitioningRule, partitioned

_MAX_PASSES = 1024  # jitted passes of each kind that are kept, for different parameters


@cleared_lru_cache(_MAX_PASSES)
def forward(params: NormParams) -> Callable[..., Any]:
    """Returns (x, scale, bias, residual) -> (y, mean, mean_low, var, rstd).

    residual may be None. mean and mean_low are None if the statistics are not centered.
    """
    kernels = {b.implementation: partial(b.forward, params) for b in BACKENDS}

    def candidates(x, scale, bias, residual):
        return candidates_of(params, "forward", params.problem(x))

    def over_devices(mesh_axes: MeshAxes) -> Callable[..., Any]:
        local_statistics = partial(_local_statistics, params)
        return partial(cross_device.forward, params, mesh_axes, local_statistics, _normalize_calls(params))

    def call(x, *rest):
        if params.mesh_axes is not None:
            return over_devices(params.mesh_axes)(x, *rest)
        names = _Names(params, x)
        mean = names.statistic if params.centered else None
        rule = PartitioningRule(
            (names.x, names.channels, names.channels, names.x),
            (names.x, mean, mean, names.statistic, names.statistic),
            names.summed,
            names.exchanged,
        )
        on_xla = xla.over_calls(partial(xla.forward, params))
        return partitioned(rule, candidates, kernels, on_xla, over_devices, _gathers(params))(x, *rest)

    return named_jit(_one(_batched(call, 5, params, forward)), f"{params.name}_forward", params)


@cleared_lru_cache(_MAX_PASSES)
def normalize(params: NormParams) -> Callable[..., Any]:
    """Returns (x, scale, bias, mean, mean_low, rstd, residual) -> (y,); mean, mean_low and residual may be None."""
    return named_jit(_one(_normalize_calls(params)), f"{params.name}_normalize", params)


def _normalize_calls(params: NormParams) -> Callable[..., Any]:
    def flat(step: Callable[..., Any]) -> Callable[..., Any]:
        def run(x, scale, bias, mean, mean_low, rstd, residual):
            return (step(params, x, scale, bias, Statistics(mean, mean_low, rstd), residual),)

        return run

    kernels = {b.implementation: flat(b.normalize) for b in TWO_STEP_BACKENDS}

    def call(x, *rest):
        names = _Names(params, x)
        statistics = (names.statistic,) * 3
        return partitioned(
            PartitioningRule((names.x, names.channels, names.channels, *statistics, names.x), (names.x,)),
            lambda x, *_: candidates_of(params, "forward", params.problem(x), in_steps=True),
            kernels,
            xla.over_calls(flat(xla.normalize)),
        )(x, *rest)

    return _batched(call, 1, params, normalize)


@cleared_lru_cache(_MAX_PASSES)
def backward(params: NormParams, needs_grad: tuple[bool, ...]) -> Callable[..., Any]:
    """Returns (x, scale, bias, mean, mean_low, rstd, y, residual, dy, dmean, dvar) -> (dx, dscale, dbias, dresidual).

    `NormBackend.backward` says which of the arrays may be None. A gradient that is not needed is None.
    """
    return named_jit(_one(_backward_calls(params, needs_grad)), f"{params.name}_backward", params, needs_grad)


def _backward_calls(params: NormParams, needs_grad: tuple[bool, ...]) -> Callable[..., Any]:
    def flat(pass_: Callable[..., Any]) -> Callable[..., Any]:
        def run(x, scale, bias, mean, mean_low, rstd, *rest):
            statistics = Statistics(mean, mean_low, rstd)
            return tuple(pass_(params, x, scale, bias, statistics, *rest, needs_grad=needs_grad))

        return run

    kernels = {b.implementation: flat(b.backward) for b in BACKENDS}

    def candidates(x, scale, bias, mean, mean_low, rstd, y, residual, dy, dmean, dvar):
        if dy is None or not any(needs_grad):
            return params.backward_candidates.on_xla()
        return candidates_of(params, "backward", params.problem(x), needs_grad)

    def over_devices(mesh_axes: MeshAxes) -> Callable[..., Any]:
        return partial(cross_device.backward, params, mesh_axes, partial(_local_sums, params), needs_grad)

    def call(x, *rest):
        if params.mesh_axes is not None:
            return over_devices(params.mesh_axes)(x, *rest)
        names = _Names(params, x)
        channels, statistic = names.channels, names.statistic
        results = (names.x, channels, channels, names.x)
        rule = PartitioningRule(
            (names.x, channels, channels, *[statistic] * 3, *[names.x] * 3, statistic, statistic),
            tuple(each if needed else None for each, needed in zip(results, needs_grad, strict=True)),
            names.summed,
            names.exchanged,
        )
        across = None if params.frozen else over_devices
        on_xla = xla.over_calls(flat(xla.backward))
        return partitioned(rule, candidates, kernels, on_xla, across, _gathers(params))(x, *rest)

    return _batched(call, 4, params)


def two_step_candidates(candidates: Candidates) -> Candidates:
    """Returns the candidates that have kernels for the single steps.

    A forced implementation without such kernels still restricts the platform.
    """
    names = [backend.implementation for backend in TWO_STEP_BACKENDS]
    return dataclasses.replace(
        candidates, implementations=tuple(name for name in candidates.implementations if name in names)
    )


def candidates_of(
    params: NormParams,
    pass_name: str,
    problem: NormProblem,
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
    if not in_steps:
        return candidates
    for each in TWO_STEP_BACKENDS:
        if not each.supports_steps(problem):
            candidates = candidates.without(each.implementation)
    return two_step_candidates(candidates)


def _one(call: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a pass without an axis of calls, from the pass with one."""

    def run(*arrays: Any) -> Any:
        results = call(*jax.tree.map(lambda array: lax.expand_dims(array, (0,)), arrays))
        return jax.tree.map(lambda result: lax.squeeze(result, (0,)), results)

    return run


def _batched(
    call: Callable[..., Any],
    num_results: int,
    params: NormParams,
    of_samples: Callable[[NormParams], Callable[..., Any]] | None = None,
) -> Callable[..., Any]:
    """Returns a pass with a batching rule: the mapped axis joins the axis of calls.

    `of_samples` returns the pass of other parameters. It is given if the operands after x are scale and bias, and no
    result sums over the samples: examples that share scale and bias then become samples.
    """
    mapped = custom_vmap(call)
    of_samples = None if params.num_groups is None else of_samples

    @mapped.def_vmap
    def rule(axis_size: int, is_mapped: Sequence[bool | None], *args: Any) -> Any:
        if axis_size == 0:
            return empty_vmap(mapped, is_mapped, args)
        if of_samples is None or is_mapped[1] or is_mapped[2] or args[1].shape[0] != 1:
            axes = (0,) * len(args)
            return folded(mapped, axes, (0,) * num_results, axis_size, is_mapped, args)
        more = dataclasses.replace(params, sample_axes=params.sample_axes + 1, feature_axis=params.feature_axis + 1)
        one_call = [
            None
            if array is None
            else lax.squeeze(array, (0,))
            if i in (1, 2)
            else lax.squeeze(broadcast(array, here, axis_size), (1,))
            for i, (array, here) in enumerate(zip(args, is_mapped, strict=True))
        ]
        results = jax.tree.map(lambda result: lax.expand_dims(result, (1,)), of_samples(more)(*one_call))
        return results, jax.tree.map(lambda _: True, results)

    return mapped


def _local_statistics(params: NormParams, x: jax.Array) -> Any:
    """Returns (mean, mean_low, var, rstd) of one device's shard."""
    kernels = {b.implementation: partial(b.statistics, params) for b in TWO_STEP_BACKENDS}
    candidates = candidates_of(params, "forward", params.problem(x), in_steps=True)
    return platform_call(candidates, kernels, xla.over_calls(partial(xla.statistics, params)), x)


def _local_sums(params: NormParams, *arrays: Any) -> Any:
    """Returns the sums of one device's shard that the backward pass needs, `xla.channel_sums`."""
    if params.num_groups is None:  # they are dbias and dscale
        candidates = candidates_of(params, "backward", params.problem(arrays[0]), in_steps=True)
        local = dataclasses.replace(params, backward_candidates=candidates, mesh_axes=None)
        _, dscale, dbias, _ = _backward_calls(local, (False, True, True, False))(*arrays)
        return dbias, dscale

    def one_call(x, scale, bias, mean, mean_low, rstd, y, residual, dy):
        statistics = Statistics(mean, mean_low, rstd)
        g = xla.through_activation(params, x, scale, bias, statistics, y, residual, dy)
        return xla.channel_sums(params, x, statistics, g)

    return xla.over_calls(one_call)(*arrays[:9])


def _gathers(params: NormParams) -> Callable[..., bool]:
    """Whether XLA's partitioner would gather the terms of sums that the rule splits: those of batch norm."""
    return lambda *_: params.num_groups is None


class _Names:
    """The names of the dimensions that a mesh may split: calls, samples, other elements, and channels without groups.

    Attributes:
      x, channels, statistic: those of x, of [K, C] arrays and of statistics.
      summed: dimensions over which the gradients of [K, C] arrays are summed.
      exchanged: dimensions over which statistics are summed.
    """

    def __init__(self, params: NormParams, x: jax.Array) -> None:
        channel = "C" if params.num_groups is None else None
        samples = tuple(f"S{axis}" for axis in range(params.sample_axes))
        rank = x.ndim - 1
        self.exchanged = tuple(f"N{axis}" for axis in range(params.sample_axes, rank) if axis != params.feature_axis)
        rest = (channel if axis == params.feature_axis else f"N{axis}" for axis in range(params.sample_axes, rank))
        self.x = ("K", *samples, *rest)
        self.channels = ("K", channel)
        self.statistic = ("K", *samples, channel)
        self.summed = (*samples, *self.exchanged)
