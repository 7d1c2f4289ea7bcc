"""The units of the convolution triangle: one jitted call each, with its rules for `vmap` and for meshes.

Which implementation a unit takes is its `Spec`'s to say; its derivatives are `_conv_triangle.py`'s.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from typing import Any

import jax
from jax.custom_batching import custom_vmap

from jaxgrad import _conv_cuda, _conv_cudnn, _conv_onednn, _conv_problem, _conv_xla, _ffi
from jaxgrad._batching import no_examples
from jaxgrad._conv_examples import by_groups, fold, mapped, more_examples, on_xla, unfold
from jaxgrad._conv_geometry import Geometry
from jaxgrad._conv_problem import Problem
from jaxgrad._dispatch import Route
from jaxgrad._partitioning import Devices, Dims, Layout, dims, jitted, on_own_part, over_mesh
from jaxgrad.config import Settings

_Kernels = Mapping[str, Callable[..., Any]]  # by implementation
_MOST_UNITS = 1024  # of each kind and of different shapes and settings, kept jitted


@dataclasses.dataclass(frozen=True)
class Spec:
    """The static arguments of a unit."""

    geometry: Geometry
    precision: Any
    routes: tuple[tuple[str, Route], ...]  # by unit
    settings: Settings
    examples: bool = False  # vmap's: each array has an axis before the geometry's, of as many independent calls

    @property
    def identity(self) -> Spec:
        """What programs differ by: not by where plans are kept."""
        return dataclasses.replace(self, settings=dataclasses.replace(self.settings, plan_cache_dir=None))

    def route(self, kind: str, problem: Problem, has_bias: bool = False, relu: bool = False) -> Route:
        """The route of a unit, for the call itself or for one of other sizes that vmap or a mesh made of it.

        Args:
          kind: of the unit.
          problem: the convolution, or those of all examples.
          has_bias: there is a bias, or its gradient is wanted.
          relu: the result's relu is taken.
        """
        found, grouped = dict(self.routes)[kind], problem.in_groups()
        if "cpu" in found.kernels and not _conv_onednn.has_plan(kind, problem, has_bias):
            found = found.without("cpu")
        if "cuda" in found.kernels and _ffi.cuda_depthwise_problem(grouped):
            found = found.without("cuda")
        if "cudnn" in found.kernels and _conv_cudnn.slower_for_examples(kind, problem):
            found = found.without("cudnn")
        if "cudnn" in found.kernels:
            epilogue = _ffi.Epilogue(has_bias, relu)
            if _conv_cudnn.without_plan(kind, grouped, self.precision, self.settings, epilogue):
                return found.without("cudnn")
        return found


@dataclasses.dataclass(frozen=True)
class _Names:
    """Which dimensions of x, w and y may be split over a mesh: the examples', and of N, the batch, and of O and I,
    output and input features, those that are asked for. Features in groups are never split."""

    spec: Spec

    def x(self, *wanted: str) -> Dims:
        return self._dims(wanted, "NI", self.spec.geometry.lhs_spec)

    def w(self, *wanted: str) -> Dims:
        return self._dims(wanted, "OI", self.spec.geometry.rhs_spec)

    def y(self, *wanted: str) -> Dims:
        return self._dims(wanted, "NO", self.spec.geometry.out_spec)

    @property
    def bias(self) -> Dims:
        return self._dims(("O",), "O", (0,))

    def _dims(self, wanted: tuple[str, ...], names: str, axes: tuple[int, ...]) -> Dims:
        grouped = self.spec.geometry.feature_group_count > 1
        found = {name: axis for name, axis in zip(names, axes, strict=False) if name in wanted}
        own = dims(len(axes), **{name: axis for name, axis in found.items() if name == "N" or not grouped})
        return ("E", *own) if self.spec.examples else own


def _unit(
    spec: Spec,
    layout: Layout,
    problem: Callable[..., Problem],
    route: Callable[..., Route],
    kernels: _Kernels,
    xla: Callable[..., Any],
    across: Callable[[Devices], Callable[..., Any]] | None = None,
) -> custom_vmap:
    """A unit over a mesh; `problem` and `route` are those of its operands."""

    def xla_gathers(*operands: Any) -> bool:
        """Whether XLA's partitioner gathers a batch that is split: of groups that are not depthwise."""
        found = problem(*operands)
        return (spec.examples or spec.geometry.feature_group_count > 1) and not found.is_depthwise

    return custom_vmap(over_mesh(layout, route, kernels, xla, across, xla_gathers))


@lru_cache(_MOST_UNITS)
def forward_unit(spec: Spec, relu: bool = False) -> Callable[..., Any]:
    g = spec.geometry

    def problem(x, w, bias):
        return _conv_problem.of_forward(g, x, w)

    def route(x, w, bias):
        return spec.route("forward", problem(x, w, bias), bias is not None, relu)

    def calls(relu: bool) -> tuple[_Kernels, Callable[..., Any]]:
        """The kernels', and XLA's."""

        def cudnn(geometry):
            return partial(_conv_cudnn.forward, geometry, spec.precision, spec.settings, relu)

        def xla(geometry):
            return partial(_conv_xla.forward, geometry, spec.precision, relu)

        axes = (g.lhs_spec[1], g.rhs_spec[0], 0), g.out_spec[1]
        kernels: _Kernels = {"cpu": partial(_conv_onednn.forward, g, relu), "cudnn": by_groups(spec, cudnn, *axes)}
        return kernels, on_xla(spec, xla, *axes)

    def across(devices):
        """Of input features that are split: the bias and the activation follow the sum."""

        def finish(y, bias):
            return _conv_xla.finish(y, bias, relu, g.out_spec)

        def call(x, w, bias):
            linear = spec.route("forward", problem(x, w, None))
            y = devices.sum(on_own_part(linear, *calls(relu=False), x, w, None))
            return (jax.vmap(finish) if spec.examples else finish)(y, bias)

        return call

    names = _Names(spec)
    layout = Layout((names.x("N", "I"), names.w("O", "I"), names.bias), (names.y("N", "O"),), summed=("I",))
    unit = _unit(spec, layout, problem, route, *calls(relu), across)

    @unit.def_vmap
    def rule(size, is_mapped, x, w, bias):
        if size == 0:
            return no_examples(unit, is_mapped, (x, w, bias))
        x_mapped, w_mapped, bias_mapped = is_mapped
        first = int(spec.examples)  # the first axis of the geometry's own
        if not w_mapped and not bias_mapped:  # more rows of the same batch
            y = unit(fold(x, first + g.lhs_spec[0]), w, bias)
            return unfold(y, first + g.out_spec[0], size), True
        if not x_mapped and g.feature_group_count == 1:  # more output features
            w = fold(mapped(w, w_mapped, size), first + g.rhs_spec[0])
            bias = None if bias is None else fold(mapped(bias, bias_mapped, size), first)
            return unfold(unit(x, w, bias), first + g.out_spec[1], size), True
        return more_examples(partial(forward_unit, relu=relu), spec, size, is_mapped, (x, w, bias))

    return jitted(unit, "conv_forward", spec.identity, relu)


@lru_cache(_MOST_UNITS)
def backward_input_unit(spec: Spec) -> Callable[..., Any]:
    g = spec.geometry
    problem = partial(_conv_problem.of_backward_input, g)

    def route(dy, w):
        return spec.route("backward_input", problem(dy, w))

    def cudnn(geometry):
        return partial(_ffi.cuda_conv_backward_input, geometry, spec.precision, spec.settings)

    def xla(geometry):
        return partial(_conv_xla.backward_input, geometry, spec.precision)

    axes = (g.out_spec[1], g.rhs_spec[0]), g.lhs_spec[1]
    kernels: _Kernels = {
        "cpu": partial(_ffi.conv_backward_input, g),
        "cudnn": by_groups(spec, cudnn, *axes),
    }
    names = _Names(spec)
    layout = Layout((names.y("N", "O"), names.w("O", "I")), (names.x("N", "I"),), summed=("O",))
    unit = _unit(spec, layout, problem, route, kernels, on_xla(spec, xla, *axes))

    @unit.def_vmap
    def rule(size, is_mapped, dy, w):
        if size == 0:
            return no_examples(unit, is_mapped, (dy, w))
        _, w_mapped = is_mapped
        if not w_mapped:
            first = int(spec.examples)
            return unfold(unit(fold(dy, first + g.out_spec[0]), w), first + g.lhs_spec[0], size), True
        return more_examples(backward_input_unit, spec, size, is_mapped, (dy, w))

    return jitted(unit, "conv_backward_input", spec.identity)


@lru_cache(_MOST_UNITS)
def backward_filter_unit(spec: Spec, want_bias: bool) -> Callable[..., Any]:
    g = spec.geometry
    problem = partial(_conv_problem.of_backward_filter, g)

    def route(x, dy):
        return spec.route("backward_filter", problem(x, dy), want_bias)

    def cuda(geometry):
        return partial(_conv_cuda.backward_filter, geometry, want_bias)

    def cudnn(geometry):
        return partial(_conv_cudnn.backward_filter, geometry, spec.precision, spec.settings, want_bias)

    def xla(x, dy):
        if spec.examples and not problem(x, dy).is_depthwise and not g.is_product:
            return _conv_xla.backward_filter_of_examples(g, spec.precision, want_bias, x, dy)
        return on_xla(spec, xla_of, *axes)(x, dy)

    def xla_of(geometry):
        return partial(_conv_xla.backward_filter, geometry, spec.precision, want_bias)

    axes = (g.lhs_spec[1], g.out_spec[1]), (g.rhs_spec[0], 0 if want_bias else None)
    kernels: _Kernels = {
        "cpu": partial(_ffi.conv_backward_filter, g, want_bias),
        "cuda": by_groups(spec, cuda, *axes),
        "cudnn": by_groups(spec, cudnn, *axes),
    }
    names = _Names(spec)
    results = (names.w("O", "I"), names.bias if want_bias else None)
    layout = Layout((names.x("N", "I"), names.y("N", "O")), results, summed=("N",))
    unit = _unit(spec, layout, problem, route, kernels, xla)

    @unit.def_vmap
    def rule(size, is_mapped, x, dy):
        if size == 0:
            return no_examples(unit, is_mapped, (x, dy))
        return more_examples(partial(backward_filter_unit, want_bias=want_bias), spec, size, is_mapped, (x, dy))

    return jitted(unit, "conv_backward_filter", spec.identity, want_bias)
