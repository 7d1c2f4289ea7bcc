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
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.custom_batching import custom_vmap

from jaxgrad import _conv_cuda, _conv_cudnn, _conv_onednn, _conv_xla, _ffi
from jaxgrad._batching import no_examples
from jaxgrad._conv_geometry import Geometry
from jaxgrad._dispatch import Route
from jaxgrad._partitioning import Dims, Layout, dims, over_mesh, vary_alike
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

    def route(
        self, kind: str, sizes: tuple[int, int, int], dtype: Any, has_bias: bool = False, relu: bool = False
    ) -> Route:
        """The route of a unit, for the call itself or for one of other sizes that vmap made of it."""
        found = dict(self.routes)[kind]
        if "cpu" in found.kernels and not _conv_onednn.has_plan(kind, self.geometry, sizes, dtype, has_bias):
            found = found.without("cpu")
        if "cuda" in found.kernels and _conv_cuda.without_plan(self.geometry, sizes, dtype):
            found = found.without("cuda")
        if "cudnn" in found.kernels and _conv_cudnn.without_plan(
            kind, self.geometry, sizes, dtype, self.precision, self.settings, _ffi.Epilogue(has_bias, relu)
        ):
            return found.without("cudnn")
        return found

    def with_groups(self, feature_group_count: int) -> Spec:
        return dataclasses.replace(self, geometry=self.geometry.with_groups(feature_group_count))


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
    """Which dimensions of x, w and y may be split over a mesh: of N, the batch, and of O and I, output and input
    features, those that are asked for. Features in groups are never split."""

    geometry: Geometry

    def x(self, *wanted: str) -> Dims:
        return self._dims(wanted, "NI", self.geometry.lhs_spec)

    def w(self, *wanted: str) -> Dims:
        return self._dims(wanted, "OI", self.geometry.rhs_spec)

    def y(self, *wanted: str) -> Dims:
        return self._dims(wanted, "NO", self.geometry.out_spec)

    @property
    def bias(self) -> Dims:
        return (None,) if self.geometry.feature_group_count > 1 else ("O",)

    def _dims(self, wanted: tuple[str, ...], names: str, spec: tuple[int, ...]) -> Dims:
        grouped = self.geometry.feature_group_count > 1
        found = {name: axis for name, axis in zip(names, spec, strict=False) if name in wanted}
        return dims(len(spec), **{name: axis for name, axis in found.items() if name == "N" or not grouped})


def _xla_gathers(geometry: Geometry, sizes: tuple[int, int, int]) -> bool:
    """Whether XLA's partitioner gathers a batch that is split: of groups, unless each has one input and one output."""
    groups, (_, features, outputs) = geometry.feature_group_count, sizes
    return groups > 1 and not features == outputs == groups


@lru_cache(_MOST_UNITS)
def _forward_unit(spec: Spec, relu: bool = False) -> Callable[..., Any]:
    def sizes(x, w, bias):
        return x.shape[g.lhs_spec[0]], x.shape[g.lhs_spec[1]], w.shape[g.rhs_spec[0]]

    def route(x, w, bias):
        return spec.route("forward", sizes(x, w, bias), x.dtype, bias is not None, relu)

    g = spec.geometry
    kernels = {
        "cpu": partial(_conv_onednn.forward, g, relu),
        "cudnn": partial(_conv_cudnn.forward, g, spec.precision, spec.settings, relu),
    }
    names = _Names(g)
    layout = Layout((names.x("N"), names.w("O"), names.bias), (names.y("N", "O"),))
    xla = partial(_conv_xla.forward, g, spec.precision, relu)
    unit = custom_vmap(over_mesh(layout, route, kernels, xla, xla_gathers=lambda *a: _xla_gathers(g, sizes(*a))))

    @unit.def_vmap
    def rule(size, is_mapped, x, w, bias):
        if size == 0:
            return no_examples(unit, is_mapped, (x, w, bias))
        x_mapped, w_mapped, bias_mapped = is_mapped
        if not w_mapped and not bias_mapped:  # more rows of the same batch
            y = unit(_fold(x, g.lhs_spec[0]), w, bias)
            return _unfold(y, g.out_spec[0], size), True
        if not x_mapped and g.feature_group_count == 1:  # more output features
            y = unit(x, _fold(_mapped(w, w_mapped, size), g.rhs_spec[0]), _fold_bias(bias, bias_mapped, size))
            return _unfold(y, g.out_spec[1], size), True
        many = _forward_unit(spec.with_groups(g.feature_group_count * size), relu)  # more groups
        x, w = _mapped(x, x_mapped, size), _mapped(w, w_mapped, size)
        y = many(_fold(x, g.lhs_spec[1]), _fold(w, g.rhs_spec[0]), _fold_bias(bias, bias_mapped, size))
        return _unfold(y, g.out_spec[1], size), True

    return jax.jit(unit)


@lru_cache(_MOST_UNITS)
def _backward_input_unit(spec: Spec) -> Callable[..., Any]:
    def sizes(dy, w):
        features = w.shape[g.rhs_spec[1]] * g.feature_group_count
        return dy.shape[g.out_spec[0]], features, dy.shape[g.out_spec[1]]

    def route(dy, w):
        return spec.route("backward_input", sizes(dy, w), dy.dtype)

    g = spec.geometry
    kernels = {
        "cpu": partial(_ffi.conv_backward_input, g),
        "cudnn": partial(_ffi.cuda_conv_backward_input, g, spec.precision, spec.settings),
    }
    names = _Names(g)
    layout = Layout((names.y("N", "O"), names.w("O", "I")), (names.x("N", "I"),), summed=("O",))
    xla = partial(_conv_xla.backward_input, g, spec.precision)
    unit = custom_vmap(over_mesh(layout, route, kernels, xla, xla_gathers=lambda *a: _xla_gathers(g, sizes(*a))))

    @unit.def_vmap
    def rule(size, is_mapped, dy, w):
        if size == 0:
            return no_examples(unit, is_mapped, (dy, w))
        dy_mapped, w_mapped = is_mapped
        if not w_mapped:
            return _unfold(unit(_fold(dy, g.out_spec[0]), w), g.lhs_spec[0], size), True
        many = _backward_input_unit(spec.with_groups(g.feature_group_count * size))
        dx = many(_fold(_mapped(dy, dy_mapped, size), g.out_spec[1]), _fold(w, g.rhs_spec[0]))
        return _unfold(dx, g.lhs_spec[1], size), True

    return jax.jit(unit)


@lru_cache(_MOST_UNITS)
def _backward_filter_unit(spec: Spec, want_bias: bool) -> Callable[..., Any]:
    def sizes(x, dy):
        return x.shape[g.lhs_spec[0]], x.shape[g.lhs_spec[1]], dy.shape[g.out_spec[1]]

    def route(x, dy):
        return spec.route("backward_filter", sizes(x, dy), x.dtype, want_bias)

    g = spec.geometry
    kernels = {
        "cpu": partial(_ffi.conv_backward_filter, g, want_bias),
        "cuda": partial(_conv_cuda.backward_filter, g, want_bias),
        "cudnn": partial(_conv_cudnn.backward_filter, g, spec.precision, spec.settings, want_bias),
    }
    names = _Names(g)
    results = (names.w("O", "I"), names.bias if want_bias else None)
    layout = Layout((names.x("N", "I"), names.y("N", "O")), results, summed=("N",))
    xla = partial(_conv_xla.backward_filter, g, spec.precision, want_bias)
    unit = custom_vmap(over_mesh(layout, route, kernels, xla, xla_gathers=lambda *a: _xla_gathers(g, sizes(*a))))

    @unit.def_vmap
    def rule(size, is_mapped, x, dy):
        if size == 0:
            return no_examples(unit, is_mapped, (x, dy))
        many = _backward_filter_unit(spec.with_groups(g.feature_group_count * size), want_bias)
        x, dy = (_mapped(a, here, size) for a, here in zip((x, dy), is_mapped, strict=True))
        dw, db = many(_fold(x, g.lhs_spec[1]), _fold(dy, g.out_spec[1]))
        unfolded = (_unfold(dw, g.rhs_spec[0], size), None if db is None else _unfold(db, 0, size))
        return unfolded, (True, None if db is None else True)

    return jax.jit(unit)


def _mapped(array: jax.Array, is_mapped: bool, size: int) -> jax.Array:
    return array if is_mapped else jnp.broadcast_to(array, (size, *array.shape))


def _fold(array: jax.Array, axis: int) -> jax.Array:
    """Merges the mapped axis, the first, into `axis` of the rest, as its slower part."""
    array = jnp.moveaxis(array, 0, axis)
    return array.reshape(*array.shape[:axis], array.shape[axis] * array.shape[axis + 1], *array.shape[axis + 2 :])


def _unfold(array: jax.Array, axis: int, size: int) -> jax.Array:
    array = array.reshape(*array.shape[:axis], size, array.shape[axis] // size, *array.shape[axis + 1 :])
    return jnp.moveaxis(array, axis, 0)


def _fold_bias(bias: jax.Array | None, is_mapped: bool | None, size: int) -> jax.Array | None:
    return None if bias is None else _fold(_mapped(bias, bool(is_mapped), size), 0)
