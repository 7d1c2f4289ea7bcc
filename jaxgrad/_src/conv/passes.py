"""The convolution passes: jitted functions with rules for `vmap` and for meshes.

`ConvParams` says which implementations may run a pass; `autodiff` differentiates the passes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
from jax.custom_batching import custom_vmap

from jaxgrad._src.choice.candidates import Candidates
from jaxgrad._src.choice.selection import supporting
from jaxgrad._src.conv.backends import BACKENDS
from jaxgrad._src.conv.call.batching import as_groups, as_independent_problems
from jaxgrad._src.conv.call.params import ConvCall, ConvParams
from jaxgrad._src.conv.call.problem import (
    ConvProblem,
    forward_problem,
    input_gradient_problem,
    weight_gradient_problem,
)
from jaxgrad._src.conv.on_xla import xla
from jaxgrad._src.core.jax_internals import cleared_lru_cache
from jaxgrad._src.run.batching import broadcast, empty_vmap, fold, unfold
from jaxgrad._src.run.lowering import platform_call
from jaxgrad._src.run.mesh_axes import MeshAxes
from jaxgrad._src.run.named_jit import named_jit
from jaxgrad._src.run.partitioning import CrossDevice, Dims, PartitioningRule, partitioned

_Kernels = Mapping[str, Callable[..., Any]]  # by implementation
_MAX_PASSES = 1024  # jitted passes of each kind that are kept, for different geometries and settings


@cleared_lru_cache(_MAX_PASSES)
def forward_pass(params: ConvParams, relu: bool = False) -> Callable[..., Any]:
    """Returns the pass (x, w, bias) -> y; bias may be None."""
    g = params.geometry
    axes = (g.lhs_spec[1], g.rhs_spec[0], 0), g.out_spec[1]

    def problem(x, w, bias):
        return forward_problem(g, x, w)

    def candidates(x, w, bias):
        return candidates_of("forward", params, problem(x, w, bias), bias is not None, relu)

    def cross_device(mesh_axes: MeshAxes) -> Callable[..., Any]:
        """For split input features: the bias and relu follow the sum over the mesh."""

        def epilogue(y, bias):
            return xla.add_bias_and_relu(y, bias, relu, g.out_spec)

        def call(x, w, bias):
            linear = candidates_of("forward", params, problem(x, w, None))
            kernels = _kernels("forward", params, *axes, False)
            y = mesh_axes.psum(platform_call(linear, kernels, partial(xla.forward, params, False), x, w, None))
            return (jax.vmap(epilogue) if params.batched else epilogue)(y, bias)

        return call

    kernels = _kernels("forward", params, *axes, relu)
    rule = forward_rule(params)
    call = _partitioned(params, rule, problem, candidates, kernels, partial(xla.forward, params, relu), cross_device)

    @call.def_vmap
    def batching_rule(size, is_mapped, x, w, bias):
        if size == 0:
            return empty_vmap(call, is_mapped, (x, w, bias))
        x_mapped, w_mapped, bias_mapped = is_mapped
        first = int(params.batched)  # the first axis of the geometry
        if not w_mapped and bias_mapped:  # the weights are shared: add each bias afterwards
            return _with_mapped_bias(size, x_mapped, x, w, bias)
        if not w_mapped:  # a larger batch
            y = call(fold(x, first + g.lhs_spec[0]), w, bias)
            return unfold(y, first + g.out_spec[0], size), True
        if not x_mapped and g.feature_group_count == 1:  # more output features
            w = fold(w, first + g.rhs_spec[0])
            bias = None if bias is None else fold(broadcast(bias, bias_mapped, size), first)
            return unfold(call(x, w, bias), first + g.out_spec[1], size), True
        return as_independent_problems(partial(forward_pass, relu=relu), params, size, is_mapped, (x, w, bias))

    def _with_mapped_bias(size, x_mapped, x, w, bias):
        def epilogue(y, bias):
            return xla.add_bias_and_relu(y, bias, relu, g.out_spec)

        if params.batched:
            epilogue = jax.vmap(epilogue)
        linear = forward_pass(params)
        first = int(params.batched)
        if x_mapped:
            y = unfold(linear(fold(x, first + g.lhs_spec[0]), w, None), first + g.out_spec[0], size)
        else:
            y = linear(x, w, None)
        return jax.vmap(epilogue, (0 if x_mapped else None, 0))(y, bias), True

    return named_jit(call, "conv_forward", params.identity, relu)


@cleared_lru_cache(_MAX_PASSES)
def input_gradient_pass(params: ConvParams) -> Callable[..., Any]:
    """Returns the pass (dy, w) -> dx."""
    g = params.geometry
    axes = (g.out_spec[1], g.rhs_spec[0]), g.lhs_spec[1]
    problem = partial(input_gradient_problem, g)

    def candidates(dy, w):
        return candidates_of("input_gradient", params, problem(dy, w))

    kernels = _kernels("input_gradient", params, *axes)
    rule = input_gradient_rule(params)
    call = _partitioned(params, rule, problem, candidates, kernels, partial(xla.input_gradient, params))

    @call.def_vmap
    def batching_rule(size, is_mapped, dy, w):
        if size == 0:
            return empty_vmap(call, is_mapped, (dy, w))
        _, w_mapped = is_mapped
        if not w_mapped:  # a larger batch
            first = int(params.batched)
            return unfold(call(fold(dy, first + g.out_spec[0]), w), first + g.lhs_spec[0], size), True
        return as_independent_problems(input_gradient_pass, params, size, is_mapped, (dy, w))

    return named_jit(call, "conv_input_gradient", params.identity)


@cleared_lru_cache(_MAX_PASSES)
def weight_gradient_pass(params: ConvParams, needs_bias_gradient: bool) -> Callable[..., Any]:
    """Returns the pass (x, dy) -> (dw, db); db is None if it is not needed."""
    g = params.geometry
    axes = (g.lhs_spec[1], g.out_spec[1]), (g.rhs_spec[0], 0 if needs_bias_gradient else None)
    problem = partial(weight_gradient_problem, g)

    def candidates(x, dy):
        return candidates_of("weight_gradient", params, problem(x, dy), needs_bias_gradient)

    names = _DimNames(params)
    results = (names.w("O", "I"), names.bias if needs_bias_gradient else None)
    rule = PartitioningRule((names.x("N", "I"), names.y("N", "O")), results, summed=("N",))
    kernels = _kernels("weight_gradient", params, *axes, needs_bias_gradient)
    on_xla = partial(xla.weight_gradient, params, needs_bias_gradient)
    call = _partitioned(params, rule, problem, candidates, kernels, on_xla)

    @call.def_vmap
    def batching_rule(size, is_mapped, x, dy):
        if size == 0:
            return empty_vmap(call, is_mapped, (x, dy))
        pass_of = partial(weight_gradient_pass, needs_bias_gradient=needs_bias_gradient)
        return as_independent_problems(pass_of, params, size, is_mapped, (x, dy))

    return named_jit(call, "conv_weight_gradient", params.identity, needs_bias_gradient)


def forward_rule(params: ConvParams) -> PartitioningRule:
    """How a mesh may split the pass (x, w, bias) -> y."""
    names = _DimNames(params)
    return PartitioningRule((names.x("N", "I"), names.w("O", "I"), names.bias), (names.y("N", "O"),), summed=("I",))


def input_gradient_rule(params: ConvParams) -> PartitioningRule:
    """How a mesh may split the pass (dy, w) -> dx."""
    names = _DimNames(params)
    return PartitioningRule((names.y("N", "O"), names.w("O", "I")), (names.x("N", "I"),), summed=("O",))


def _kernels(
    pass_name: str, params: ConvParams, operand_axes: Sequence[int], result_axes: Any, *static: Any
) -> _Kernels:
    """The kernel call of each backend; `static` are its arguments between params and the arrays."""

    def kernel(backend):
        def call_of(params):
            return partial(getattr(backend, pass_name), params, *static)

        if backend.takes_independent_problems or not params.batched:
            return call_of(params)
        return as_groups(params, call_of, operand_axes, result_axes)

    return {backend.implementation: kernel(backend) for backend in BACKENDS}


def candidates_of(
    pass_name: str, params: ConvParams, problem: ConvProblem, has_bias: bool = False, relu: bool = False
) -> Candidates:
    """The candidates of the call for a problem of other sizes, which `vmap` or a mesh may have made of it."""
    call = ConvCall(problem, params.precision, params.settings, has_bias, relu)
    return supporting(dict(params.candidates)[pass_name], BACKENDS, pass_name, call)


def _partitioned(
    params: ConvParams,
    rule: PartitioningRule,
    problem: Callable[..., ConvProblem],
    candidates: Callable[..., Candidates],
    kernels: _Kernels,
    on_xla: Callable[..., Any],
    cross_device: CrossDevice | None = None,
) -> custom_vmap:
    """A pass that follows the rule over a mesh; `problem` and `candidates` are functions of its operands."""

    def xla_gathers(*operands: Any) -> bool:
        """Whether XLA's partitioner gathers a split batch: it does for groups that are not depthwise."""
        found = problem(*operands)
        return (params.batched or params.geometry.feature_group_count > 1) and not found.is_depthwise

    return custom_vmap(partitioned(rule, candidates, kernels, on_xla, cross_device, xla_gathers))


@dataclasses.dataclass(frozen=True)
class _DimNames:
    """Names of the dimensions of x, w and y that a mesh may split.

    P: independent problems, N: batch, I: input features, O: output features. Features in groups are never split.
    """

    params: ConvParams

    def x(self, *names: str) -> Dims:
        return self._dims(names, "NI", self.params.geometry.lhs_spec)

    def w(self, *names: str) -> Dims:
        return self._dims(names, "OI", self.params.geometry.rhs_spec)

    def y(self, *names: str) -> Dims:
        return self._dims(names, "NO", self.params.geometry.out_spec)

    @property
    def bias(self) -> Dims:
        return self._dims(("O",), "O", (0,))

    def _dims(self, names: tuple[str, ...], of_axes: str, axes: tuple[int, ...]) -> Dims:
        grouped = self.params.geometry.feature_group_count > 1
        split = [name for name in names if name == "N" or not grouped]
        by_axis = {axis: name for name, axis in zip(of_axes, axes, strict=False) if name in split}
        named = tuple(map(by_axis.get, range(len(axes))))
        return ("P", *named) if self.params.batched else named
