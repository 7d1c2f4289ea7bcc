"""The convolution triangle: three bilinear units, each the `jax.custom_vjp` of the other two.

  forward(x, w, bias)    y  = conv(x, w) + bias
  backward_input(dy, w)  dx, the transpose of conv in x
  backward_filter(x, dy) dw and db, the transpose of conv in w and bias

Since each unit's derivatives are the other two, gradients of gradients run on the same kernels to any order, and a
transposed convolution is backward_input read as an op of its own. forward_relu(x, w, bias) stands beside them: its
derivatives are forward's, of a dy that is zero where y is.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.custom_batching import custom_vmap

from jaxgrad import _conv_cuda, _conv_cudnn, _conv_onednn, _conv_xla, _ffi
from jaxgrad._batching import no_examples
from jaxgrad._conv_examples import by_groups, fold, mapped, more_examples, unfold
from jaxgrad._conv_geometry import Geometry, leading_sizes
from jaxgrad._dispatch import Route
from jaxgrad._partitioning import Dims, Layout, dims, on_own_part, over_mesh, vary_alike
from jaxgrad.config import Settings

# What policies of `jax.checkpoint` know a differentiated result by: the op that the unit is.
_FORWARD_NAME, _BACKWARD_INPUT_NAME = "jaxgrad.conv_general_dilated", "jaxgrad.conv_transpose"
_MOST_UNITS = 1024  # of each kind and of different shapes and settings, kept jitted


@dataclasses.dataclass(frozen=True)
class Spec:
    """The static arguments of a unit."""

    geometry: Geometry
    precision: Any
    routes: tuple[tuple[str, Route], ...]  # by unit
    settings: Settings
    examples: bool = False  # vmap's: each array has an axis before the geometry's, of as many independent calls

    def route(
        self,
        kind: str,
        sizes: tuple[int, int, int],
        first: jax.Array,
        has_bias: bool = False,
        relu: bool = False,
    ) -> Route:
        """The route of a unit, for the call itself or for one of other sizes that vmap made of it.

        Args:
          kind: of the unit.
          sizes: batch, features and output features, of one example.
          first: the unit's first operand.
          has_bias: there is a bias, or its gradient is wanted.
          relu: the result's relu is taken.
        """
        found, dtype = dict(self.routes)[kind], first.dtype
        examples = first.shape[:1] if self.examples else ()
        if "cpu" in found.kernels and not _conv_onednn.has_plan(kind, self.geometry, sizes, dtype, has_bias, examples):
            found = found.without("cpu")
        (batch, inn, out), groups = sizes, math.prod(examples)
        geometry, grouped = self.geometry.in_groups(groups), (batch, inn * groups, out * groups)
        if "cuda" in found.kernels and _conv_cuda.without_plan(geometry, grouped, dtype):
            found = found.without("cuda")
        if "cudnn" in found.kernels:
            epilogue = _ffi.Epilogue(has_bias, relu)
            if _conv_cudnn.without_plan(kind, geometry, grouped, dtype, self.precision, self.settings, epilogue):
                return found.without("cudnn")
        return found


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Wanted:
    """Which operands are differentiated: a residual known while tracing."""

    flags: tuple[bool, ...]


def _values_and_wanted(*primals: Any) -> tuple[tuple[Any, ...], _Wanted]:
    values = tuple(None if p is None else p.value for p in primals)
    return values, _Wanted(tuple(p is not None and p.perturbed for p in primals))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def forward(spec, x, w, bias):
    """y, in the layout of the geometry's out_spec; bias [output features] or None."""
    return _forward_unit(spec)(x, w, bias)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def forward_relu(spec, x, w, bias):
    """The relu of y: the forward unit with an epilogue, which a kernel may have, and the only thing here not linear."""
    return _forward_unit(spec, relu=True)(x, w, bias)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def backward_input(spec, dy, w):
    """dx, in the layout of the geometry's lhs_spec."""
    return _backward_input_unit(spec)(dy, w)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def backward_filter(spec, want_bias, x, dy):
    """(dw, db), dw in the layout of the geometry's rhs_spec, db [output features] or None if not wanted."""
    return _backward_filter_unit(spec, want_bias)(x, dy)


def _forward_fwd(spec, x, w, bias):
    (x, w, bias), wanted = _values_and_wanted(x, w, bias)
    return checkpoint_name(forward(spec, x, w, bias), _FORWARD_NAME), (x, w, wanted)


def _forward_bwd(spec, residuals, dy):
    x, w, wanted = residuals
    want_x, want_w, want_bias = wanted.flags
    dx = backward_input(spec, dy, w) if want_x else None
    dw = db = None
    if want_w:
        dw, db = backward_filter(spec, want_bias, x, dy)
    elif want_bias:
        db = _conv_xla.bias_gradient(spec.geometry, dy)
    return dx, dw, db


def _forward_relu_fwd(spec, x, w, bias):
    (x, w, bias), wanted = _values_and_wanted(x, w, bias)
    y = checkpoint_name(forward_relu(spec, x, w, bias), _FORWARD_NAME)
    return y, (y, (x, w, wanted))


def _forward_relu_bwd(spec, residuals, dy):
    y, of_forward = residuals
    return _forward_bwd(spec, of_forward, _conv_xla.where_passed(y, dy))


def _backward_input_fwd(spec, dy, w):
    (dy, w), wanted = _values_and_wanted(dy, w)
    return checkpoint_name(backward_input(spec, dy, w), _BACKWARD_INPUT_NAME), (dy, w, wanted)


def _backward_input_bwd(spec, residuals, dx):
    dy, w, wanted = residuals
    want_dy, want_w = wanted.flags
    return (
        forward(spec, dx, w, None) if want_dy else None,
        backward_filter(spec, False, dx, dy)[0] if want_w else None,
    )


def _backward_filter_fwd(spec, want_bias, x, dy):
    (x, dy), wanted = _values_and_wanted(x, dy)
    return backward_filter(spec, want_bias, x, dy), (x, dy, wanted)


def _backward_filter_bwd(spec, want_bias, residuals, cotangents):
    x, dy, wanted = residuals
    want_x, want_dy = wanted.flags
    dw, db = (jnp.zeros(c.shape, c.dtype) if _is_symbolic_zero(c) else c for c in (*cotangents,))
    x, dy, dw, db = vary_alike(x, dy, dw, db)
    return (
        backward_input(spec, dy, dw) if want_x else None,
        forward(spec, x, dw, db) if want_dy else None,
    )


def _is_symbolic_zero(cotangent: Any) -> bool:
    return isinstance(cotangent, jax.custom_derivatives.SymbolicZero)


forward.defvjp(_forward_fwd, _forward_bwd, symbolic_zeros=True)
forward_relu.defvjp(_forward_relu_fwd, _forward_relu_bwd, symbolic_zeros=True)
backward_input.defvjp(_backward_input_fwd, _backward_input_bwd, symbolic_zeros=True)
backward_filter.defvjp(_backward_filter_fwd, _backward_filter_bwd, symbolic_zeros=True)


# --- one call each, jitted, with a batching rule ------------------------------------------------------------------


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


def _xla_gathers(spec: Spec, sizes: tuple[int, int, int]) -> bool:
    """Whether XLA's partitioner gathers a batch that is split: of groups, unless each has one input and one output."""
    groups, (_, features, outputs) = spec.geometry.feature_group_count, sizes
    return (spec.examples or groups > 1) and not features == outputs == groups


@lru_cache(_MOST_UNITS)
def _forward_unit(spec: Spec, relu: bool = False) -> Callable[..., Any]:
    def sizes(x, w, bias):
        return *leading_sizes(x, g.lhs_spec), leading_sizes(w, g.rhs_spec)[0]

    def route(x, w, bias):
        return spec.route("forward", sizes(x, w, bias), x, bias is not None, relu)

    def calls(relu):
        """By implementation, the kernels; and XLA's call."""

        def cudnn(geometry):
            return partial(_conv_cudnn.forward, geometry, spec.precision, spec.settings, relu)

        def xla(geometry):
            return partial(_conv_xla.forward, geometry, spec.precision, relu)

        axes = (g.lhs_spec[1], g.rhs_spec[0], 0), g.out_spec[1]
        kernels = {"cpu": partial(_conv_onednn.forward, g, relu), "cudnn": by_groups(spec, cudnn, *axes)}
        return kernels, by_groups(spec, xla, *axes)

    def across(devices):
        """Of input features that are split: the bias and the activation follow the sum."""

        def finish(y, bias):
            return _conv_xla.finish(y, bias, relu, g.out_spec)

        def call(x, w, bias):
            linear = spec.route("forward", sizes(x, w, None), x)
            y = devices.sum(on_own_part(linear, *calls(relu=False), x, w, None))
            return (jax.vmap(finish) if spec.examples else finish)(y, bias)

        return call

    g = spec.geometry
    names = _Names(spec)
    layout = Layout((names.x("N", "I"), names.w("O", "I"), names.bias), (names.y("N", "O"),), summed=("I",))
    kernels, xla = calls(relu)
    unit = custom_vmap(over_mesh(layout, route, kernels, xla, across, lambda *a: _xla_gathers(spec, sizes(*a))))

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
        return more_examples(partial(_forward_unit, relu=relu), spec, size, is_mapped, (x, w, bias))

    return jax.jit(unit)


@lru_cache(_MOST_UNITS)
def _backward_input_unit(spec: Spec) -> Callable[..., Any]:
    def sizes(dy, w):
        batch, out_features = leading_sizes(dy, g.out_spec)
        return batch, leading_sizes(w, g.rhs_spec)[1] * g.feature_group_count, out_features

    def route(dy, w):
        return spec.route("backward_input", sizes(dy, w), dy)

    def cudnn(geometry):
        return partial(_ffi.cuda_conv_backward_input, geometry, spec.precision, spec.settings)

    def xla(geometry):
        return partial(_conv_xla.backward_input, geometry, spec.precision)

    g = spec.geometry
    axes = (g.out_spec[1], g.rhs_spec[0]), g.lhs_spec[1]
    kernels: dict[str, Callable[..., Any]] = {
        "cpu": partial(_ffi.conv_backward_input, g),
        "cudnn": by_groups(spec, cudnn, *axes),
    }
    names = _Names(spec)
    layout = Layout((names.y("N", "O"), names.w("O", "I")), (names.x("N", "I"),), summed=("O",))
    xla_call = by_groups(spec, xla, *axes)
    unit = custom_vmap(over_mesh(layout, route, kernels, xla_call, None, lambda *a: _xla_gathers(spec, sizes(*a))))

    @unit.def_vmap
    def rule(size, is_mapped, dy, w):
        if size == 0:
            return no_examples(unit, is_mapped, (dy, w))
        _, w_mapped = is_mapped
        if not w_mapped:
            first = int(spec.examples)
            return unfold(unit(fold(dy, first + g.out_spec[0]), w), first + g.lhs_spec[0], size), True
        return more_examples(_backward_input_unit, spec, size, is_mapped, (dy, w))

    return jax.jit(unit)


@lru_cache(_MOST_UNITS)
def _backward_filter_unit(spec: Spec, want_bias: bool) -> Callable[..., Any]:
    def sizes(x, dy):
        return *leading_sizes(x, g.lhs_spec), leading_sizes(dy, g.out_spec)[1]

    def route(x, dy):
        return spec.route("backward_filter", sizes(x, dy), x, want_bias)

    def cuda(geometry):
        return partial(_conv_cuda.backward_filter, geometry, want_bias)

    def cudnn(geometry):
        return partial(_conv_cudnn.backward_filter, geometry, spec.precision, spec.settings, want_bias)

    def xla(geometry):
        return partial(_conv_xla.backward_filter, geometry, spec.precision, want_bias)

    g = spec.geometry
    axes = (g.lhs_spec[1], g.out_spec[1]), (g.rhs_spec[0], 0 if want_bias else None)
    kernels: dict[str, Callable[..., Any]] = {
        "cpu": partial(_ffi.conv_backward_filter, g, want_bias),
        "cuda": by_groups(spec, cuda, *axes),
        "cudnn": by_groups(spec, cudnn, *axes),
    }
    names = _Names(spec)
    results = (names.w("O", "I"), names.bias if want_bias else None)
    layout = Layout((names.x("N", "I"), names.y("N", "O")), results, summed=("N",))
    xla_call = by_groups(spec, xla, *axes)
    unit = custom_vmap(over_mesh(layout, route, kernels, xla_call, None, lambda *a: _xla_gathers(spec, sizes(*a))))

    @unit.def_vmap
    def rule(size, is_mapped, x, dy):
        if size == 0:
            return no_examples(unit, is_mapped, (x, dy))
        return more_examples(partial(_backward_filter_unit, want_bias=want_bias), spec, size, is_mapped, (x, dy))

    return jax.jit(unit)
