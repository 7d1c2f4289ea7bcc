"""The convolution passes on XLA, in the forms of forms.py.

A window that covers all of x is one matrix product, and so are windows that do not overlap (patches.py). The
weight gradients of groups, and of independent problems, which JAX turns into groups, may be matrix products for each
tap of the window (taps.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.lax import conv_general_dilated  # held by name: a program may assign jaxgrad's op to jax.lax
from jax.sharding import NamedSharding, PartitionSpec

from jaxgrad._src.conv.call.batching import as_groups
from jaxgrad._src.conv.call.geometry import ConvGeometry, maybe_reverse_window, pad_spatial
from jaxgrad._src.conv.call.params import ConvParams
from jaxgrad._src.conv.call.problem import (
    ConvProblem,
    forward_problem,
    input_gradient_problem,
    laid_out,
    weight_gradient_problem,
)
from jaxgrad._src.conv.on_xla.faults import padding_of_x
from jaxgrad._src.conv.on_xla.forms import CONVOLUTION, PATCHES, PRODUCT, TAPS, preferred_form
from jaxgrad._src.conv.on_xla.patches import product_of_patches, products_by_group
from jaxgrad._src.conv.on_xla.taps import weight_gradient_by_taps, weight_gradients_of_problems
from jaxgrad._src.run.mesh_axes import explicit_mesh, pvary_to_match

_Convolve = Callable[[ConvGeometry, Any, jax.Array, jax.Array], jax.Array]  # y of (geometry, precision, x, w)


def forward(
    params: ConvParams, relu: bool, x: jax.Array, w: jax.Array, bias: jax.Array | None, *, form: str | None = None
) -> jax.Array:
    """y = conv(x, w) + bias, or the relu of it. form: as in `on_xla.forms`; None for the fastest."""
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
                transpose = partial(weight_gradient_by_taps, own.geometry, own.precision)
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
    """A call; for independent problems a batched matrix product, or groups of one convolution."""
    if not params.batched:
        return call_of(params)
    if convolve in (_matrix_product, product_of_patches, products_by_group):
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

    XLA would call a convolution of cuDNN, which takes longer.
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
    shape = laid_out(geometry.lhs_spec, dy.shape[geometry.out_spec[0]], features, geometry.x_spatial)
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
    dw = weight_gradients_of_problems(geometry, precision, x, dy)
    return dw, jax.vmap(partial(bias_gradient, geometry))(dy) if needs_bias_gradient else None


def _transpose_in_w(
    geometry: ConvGeometry, precision: Any, convolve: _Convolve, x: jax.Array, dy: jax.Array
) -> jax.Array:
    features = (dy.shape[geometry.out_spec[1]], x.shape[geometry.lhs_spec[1]] // geometry.feature_group_count)
    # A w that is the same on all devices would make the transpose sum over them; the rule that needs dw does so later.
    w, _ = pvary_to_match(jnp.zeros(laid_out(geometry.rhs_spec, *features, geometry.w_spatial), x.dtype), x)
    (dw,) = jax.linear_transpose(lambda w: convolve(geometry, precision, x, w), w)(dy)
    return maybe_reverse_window(geometry, dw)


def bias_gradient(geometry: ConvGeometry, dy: jax.Array) -> jax.Array:
    """dy summed over all axes but the feature axis."""
    return dy.sum([axis for axis in range(dy.ndim) if axis != geometry.out_spec[1]])
