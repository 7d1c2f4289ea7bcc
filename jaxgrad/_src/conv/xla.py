"""The convolution passes on XLA, in the forms of conv/xla_forms.py.

A window that covers all of x is one matrix product, and so are windows that do not overlap (conv/patches.py). JAX
writes the weight gradient of a grouped convolution as a convolution with `batch_group_count`, for which XLA has no fast
code on a CPU. The form by taps is one matrix product for each tap of the window: the elements of x under the tap times
dy, by groups. The weight gradients of independent problems, which JAX turns into groups, have that form too.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.lax import conv_general_dilated  # held by name: a program may assign jaxgrad's op to jax.lax
from jax.sharding import NamedSharding, PartitionSpec

from jaxgrad._src.conv.batching import as_groups
from jaxgrad._src.conv.geometry import ConvGeometry, maybe_reverse_window, pad_spatial, shape_of
from jaxgrad._src.conv.params import ConvParams
from jaxgrad._src.conv.patches import product_of_patches, products_by_group
from jaxgrad._src.conv.problem import (
    ConvProblem,
    forward_problem,
    input_gradient_problem,
    weight_gradient_problem,
)
from jaxgrad._src.conv.xla_faults import padding_of_x
from jaxgrad._src.conv.xla_forms import CONVOLUTION, PATCHES, PRODUCT, TAPS, preferred_form
from jaxgrad._src.core.mesh_axes import explicit_mesh, pvary_to_match

_MOST_TAPS_UNROLLED = 64
_TAPS_BYTES = 1 << 29  # of the elements of x that a GPU gathers for one matrix product

_Convolve = Callable[[ConvGeometry, Any, jax.Array, jax.Array], jax.Array]  # y of (geometry, precision, x, w)


def forward(
    params: ConvParams, relu: bool, x: jax.Array, w: jax.Array, bias: jax.Array | None, *, form: str | None = None
) -> jax.Array:
    """y = conv(x, w) + bias, or the relu of it. form: as in `conv.xla_forms`; None for the fastest."""
    g = params.geometry

    def in_form(form: str) -> Callable[..., Any]:
        convolve = products_by_group if form == PATCHES else _CONVOLVE[form]

        def call_of(params):
            return partial(_forward, params.geometry, params.precision, convolve, relu)

        return _per_problem(params, convolve, call_of, (g.lhs_spec[1], g.rhs_spec[0], 0), g.out_spec[1])

    return _in_form_or_fastest(form, "forward", forward_problem(g, x, w), in_form)(x, w, bias)


def input_gradient(params: ConvParams, dy: jax.Array, w: jax.Array, *, form: str | None = None) -> jax.Array:
    """dx, the transpose of the convolution in x. form: as in `forward`."""
    g = params.geometry

    def in_form(form: str) -> Callable[..., Any]:
        convolve = _CONVOLVE[form]

        def call_of(params):
            return partial(_input_gradient, params.geometry, params.precision, convolve)

        return _per_problem(params, convolve, call_of, (g.out_spec[1], g.rhs_spec[0]), g.lhs_spec[1])

    return _in_form_or_fastest(form, "input_gradient", input_gradient_problem(g, dy, w), in_form)(dy, w)


def weight_gradient(
    params: ConvParams, needs_bias_gradient: bool, x: jax.Array, dy: jax.Array, *, form: str | None = None
) -> tuple[jax.Array, jax.Array | None]:
    """dw, the transpose of the convolution in w, and the bias gradient if needed. form: as in `forward`."""
    g = params.geometry
    problem = weight_gradient_problem(g, x, dy)

    def in_form(form: str) -> Callable[..., Any]:
        if form == TAPS and params.batched and not problem.is_depthwise:
            return partial(_weight_gradients_of_problems, g, params.precision, needs_bias_gradient)
        convolve = None if form == TAPS else _CONVOLVE[form]

        def call_of(own):
            if convolve is None:
                transpose = partial(_grouped_weight_gradient, own.geometry, own.precision)
            else:
                transpose = partial(_transpose_in_w, own.geometry, own.precision, convolve)
            return partial(_weight_gradient, own.geometry, transpose, needs_bias_gradient)

        results = (g.rhs_spec[0], 0 if needs_bias_gradient else None)
        return _per_problem(params, convolve, call_of, (g.lhs_spec[1], g.out_spec[1]), results)

    return _in_form_or_fastest(form, "weight_gradient", problem, in_form)(x, dy)


def _in_form_or_fastest(
    form: str | None, pass_name: str, problem: ConvProblem, make: Callable[[str], Callable[..., Any]]
) -> Callable[..., Any]:
    """The pass in a form, or if it is None in the fastest one, which may depend on the platform of the program.

    `make` returns the pass in a given form.
    """
    on_gpu, elsewhere = (form or preferred_form(pass_name, problem, platform) for platform in ("cuda", "cpu"))
    if on_gpu == elsewhere:
        return make(on_gpu)
    return partial(lax.platform_dependent, cuda=make(on_gpu), default=make(elsewhere))


def _per_problem(
    params: ConvParams,
    convolve: _Convolve | None,
    call_of: Callable[[ConvParams], Callable[..., Any]],
    operand_axes: Sequence[int],
    result_axes: Any,
) -> Callable[..., Any]:
    """A call for independent problems: a batched matrix product, or groups of one convolution."""
    if params.batched and convolve in (_matrix_product, product_of_patches, products_by_group):
        return jax.vmap(call_of(params))
    return as_groups(params, call_of, operand_axes, result_axes)


def _forward(
    geometry: ConvGeometry,
    precision: Any,
    convolve: _Convolve,
    relu: bool,
    x: jax.Array,
    w: jax.Array,
    bias: jax.Array | None,
) -> jax.Array:
    y = convolve(geometry, precision, x, maybe_reverse_window(geometry, w))
    return add_bias_and_relu(y, bias, relu, geometry.out_spec)


def _convolution(geometry: ConvGeometry, precision: Any, x: jax.Array, w: jax.Array) -> jax.Array:
    return conv_general_dilated(
        x,
        w,
        geometry.window_strides,
        geometry.padding,
        rhs_dilation=geometry.rhs_dilation,
        dimension_numbers=geometry.dimension_numbers,
        feature_group_count=geometry.feature_group_count,
        precision=precision,
    )


def _matrix_product(geometry: ConvGeometry, precision: Any, x: jax.Array, w: jax.Array) -> jax.Array:
    """y as a matrix product; its transposes, dx and dw, are matrix products too.

    XLA would call a convolution. For 100 features to 4x4x1024 cuDNN then takes 1.7 to 5 times as long on an H200.
    """
    of_x, of_w = geometry.lhs_spec[1:], geometry.rhs_spec[1:]
    in_memory = sorted(range(len(of_x)), key=lambda i: of_x[i])  # so that x need not be transposed
    contracted = tuple(of_x[i] for i in in_memory), tuple(of_w[i] for i in in_memory)
    y = lax.dot_general(x, w, (contracted, ((), ())), precision=precision)
    batch, feature, *spatial = geometry.out_spec
    return lax.expand_dims(y if batch < feature else y.T, spatial)


# By form, y. The passes are this and its transposes, except the weight gradient by taps.
_CONVOLVE: dict[str, _Convolve] = {
    CONVOLUTION: _convolution,
    PRODUCT: _matrix_product,
    PATCHES: product_of_patches,
}


def add_bias_and_relu(y: jax.Array, bias: jax.Array | None, with_relu: bool, spec: Sequence[int]) -> jax.Array:
    """Adds the bias, unless it is None, to the result of a convolution, and applies relu if asked."""
    y = y if bias is None else add_bias(y, bias, spec)
    return relu(y) if with_relu else y


@jax.custom_jvp
def relu(x: jax.Array) -> jax.Array:
    """`jax.nn.relu` with a derivative that reads the result, so that x is not a residual."""
    return jnp.maximum(x, 0)


@relu.defjvp
def _relu_jvp(primals, tangents):
    y = relu(*primals)
    return y, relu_grad(y, *tangents)


def relu_grad(y: jax.Array, derivative: jax.Array) -> jax.Array:
    """The derivative of y = relu(x) times `derivative`: zero where x was zero, negative or NaN."""
    return jnp.where(y > 0, derivative, jnp.zeros((), derivative.dtype))


def add_bias(y: jax.Array, bias: jax.Array, spec: Sequence[int]) -> jax.Array:
    """y + bias [C] along the feature axis of y, whose layout is `spec`.

    16-bit types are added in float32, so that the bias gradient, a sum over all of y, is accumulated in float32 too.
    """
    if mesh := explicit_mesh(y, bias):
        feature_axes = jax.typeof(y).sharding.spec[spec[1]]
        bias = jax.sharding.reshard(bias, NamedSharding(mesh, PartitionSpec(feature_axes)))
    wide = jnp.dtype(jnp.float32) if y.dtype.itemsize == 2 else y.dtype
    expanded = lax.expand_dims(bias.astype(wide), [axis for axis in range(y.ndim) if axis != spec[1]])
    return (y.astype(wide) + expanded).astype(y.dtype)


def _input_gradient(
    geometry: ConvGeometry, precision: Any, convolve: _Convolve, dy: jax.Array, w: jax.Array
) -> jax.Array:
    features = w.shape[geometry.rhs_spec[1]] * geometry.feature_group_count
    shape = shape_of(geometry.lhs_spec, dy.shape[geometry.out_spec[0]], features, geometry.x_spatial)
    x, _ = pvary_to_match(jnp.zeros(shape, dy.dtype), dy)
    w = maybe_reverse_window(geometry, w)
    first = padding_of_x(geometry)
    geometry = geometry.with_padded_x(first)
    (dx,) = jax.linear_transpose(
        lambda x: convolve(geometry, precision, pad_spatial(x, geometry.lhs_spec, first), w), x
    )(dy)
    return dx


def _weight_gradient(
    geometry: ConvGeometry,
    transpose: Callable[[jax.Array, jax.Array], jax.Array],
    needs_bias_gradient: bool,
    x: jax.Array,
    dy: jax.Array,
) -> tuple[jax.Array, jax.Array | None]:
    dw = transpose(x, dy)
    return dw, bias_gradient(geometry, dy) if needs_bias_gradient else None


def _weight_gradients_of_problems(
    geometry: ConvGeometry, precision: Any, needs_bias_gradient: bool, x: jax.Array, dy: jax.Array
) -> tuple[jax.Array, jax.Array | None]:
    """The weight gradients of independent problems, along a first axis of x, dy and the results.

    A GPU has the memory to take many taps at once: one matrix product for each problem, of the elements of x under all
    taps of the window. JAX makes groups of one convolution of them, for which XLA is slow if the problems are small.
    """
    on_cpu, on_gpu = (partial(_products_by_taps, geometry, precision, limit) for limit in (0, _TAPS_BYTES))
    dw = lax.platform_dependent(x, dy, cuda=on_gpu, default=on_cpu)
    return dw, jax.vmap(partial(bias_gradient, geometry))(dy) if needs_bias_gradient else None


def _transpose_in_w(
    geometry: ConvGeometry, precision: Any, convolve: _Convolve, x: jax.Array, dy: jax.Array
) -> jax.Array:
    features = (dy.shape[geometry.out_spec[1]], x.shape[geometry.lhs_spec[1]] // geometry.feature_group_count)
    # A w that is the same on all devices would make the transpose sum over them; the rule that needs dw does so later.
    w, _ = pvary_to_match(jnp.zeros(shape_of(geometry.rhs_spec, *features, geometry.w_spatial), x.dtype), x)
    (dw,) = jax.linear_transpose(lambda w: convolve(geometry, precision, x, w), w)(dy)
    return maybe_reverse_window(geometry, dw)


def bias_gradient(geometry: ConvGeometry, dy: jax.Array) -> jax.Array:
    """dy summed over all axes but the feature axis."""
    return dy.sum([axis for axis in range(dy.ndim) if axis != geometry.out_spec[1]])


def _grouped_weight_gradient(geometry: ConvGeometry, precision: Any, x: jax.Array, dy: jax.Array) -> jax.Array:
    (dw,) = _products_by_taps(geometry, precision, 0, x[None], dy[None])
    return dw


def _products_by_taps(
    geometry: ConvGeometry, precision: Any, taps_bytes: int, x: jax.Array, dy: jax.Array
) -> jax.Array:
    """dw of each independent problem, tap by tap, or by as many taps at once as gather at most `taps_bytes` of x."""
    num_problems, groups, spatial = x.shape[0], geometry.feature_group_count, len(geometry.w_spatial)
    x = _by_group(x, geometry.lhs_spec, groups)
    x = lax.pad(x, jnp.zeros((), x.dtype), [(0, 0, 0), (0, 0, 0), *((*p, 0) for p in geometry.padding), (0, 0, 0)])
    dy = _by_group(dy, geometry.out_spec, groups)
    dy = dy.reshape(dy.shape[0], -1, dy.shape[-1])
    spans = [(n - 1) * s + 1 for n, s in zip(geometry.y_spatial, geometry.window_strides, strict=True)]

    def gathered(offsets: Any) -> jax.Array:
        """[P G, positions, input features of a group], the elements of x under one tap of the window."""
        start = [o * d for o, d in zip(offsets, geometry.rhs_dilation, strict=True)]
        found = lax.dynamic_slice(x, (0, 0, *start, 0), (*x.shape[:2], *spans, x.shape[-1]))
        found = lax.slice(found, (0,) * found.ndim, found.shape, (1, 1, *geometry.window_strides, 1))
        return found.reshape(found.shape[0], -1, found.shape[-1])

    def product(taps: Sequence[Any]) -> jax.Array:
        """[P G, output features of a group, taps, input features of a group]"""
        elements = jnp.concatenate([gathered(offsets) for offsets in taps], -1)
        found = lax.dot_general(dy, elements, (((1,), (1,)), ((0,), (0,))), precision=precision)
        return found.reshape(*found.shape[:2], len(taps), -1)

    window = geometry.w_spatial
    if math.prod(window) <= _MOST_TAPS_UNROLLED:
        taps = list(itertools.product(*map(range, window)))
        tap_bytes = math.prod(dy.shape[:2]) * x.shape[-1] * x.dtype.itemsize
        at_once = max(1, min(len(taps), taps_bytes // tap_bytes))
        found = jnp.concatenate([product(taps[i : i + at_once]) for i in range(0, len(taps), at_once)], 2)
    else:  # computed, because `custom_partitioning` does not accept constants
        indices = jnp.arange(math.prod(window))
        found = jnp.moveaxis(lax.map(lambda i: product([jnp.unravel_index(i, window)])[:, :, 0], indices), 0, 2)
    # [P G, O, taps, I] -> [P, G O, I, window] -> the layout of w.
    found = found.reshape(num_problems, -1, *window, found.shape[-1])
    canonical = jnp.moveaxis(found, -1, 2)
    dw = jnp.transpose(canonical, [0, *(1 + geometry.rhs_spec.index(axis) for axis in range(spatial + 2))])
    return maybe_reverse_window(geometry, dw)


def _by_group(array: jax.Array, spec: tuple[int, ...], groups: int) -> jax.Array:
    """[P G, N, *spatial, features of a group] of an array with an axis of P problems before the axes of `spec`."""
    batch, feature, *spatial = (axis + 1 for axis in spec)
    array = jnp.transpose(array, (0, batch, *spatial, feature))
    array = jnp.moveaxis(array.reshape(*array.shape[:-1], groups, -1), -2, 1)
    return array.reshape(-1, *array.shape[2:])
