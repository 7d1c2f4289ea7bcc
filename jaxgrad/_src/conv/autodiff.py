"""The convolution triangle: three bilinear units, each the `jax.custom_vjp` of the other two.

  forward(x, w, bias)    y  = conv(x, w) + bias
  backward_input(dy, w)  dx, the transpose of conv in x
  backward_filter(x, dy) dw and db, the transpose of conv in w and bias

Since each unit's derivatives are the other two, gradients of gradients run on the same kernels to any order, and a
transposed convolution is backward_input read as an op of its own. forward_relu(x, w, bias) stands beside them: its
derivatives are forward's, of a dy that is zero where y is.
"""

from __future__ import annotations

from functools import partial

import jax
from jax.ad_checkpoint import checkpoint_name

from jaxgrad import _conv_xla
from jaxgrad._conv_units import Spec, backward_filter_unit, backward_input_unit, forward_unit
from jaxgrad._partitioning import vary_alike
from jaxgrad._symbolic_zeros import instantiated, values_and_wanted

__all__ = ["Spec", "backward_filter", "backward_input", "forward", "forward_relu"]

# What policies of `jax.checkpoint` know a differentiated result by: the op that the unit is.
_FORWARD_NAME, _BACKWARD_INPUT_NAME = "jaxgrad.conv_general_dilated", "jaxgrad.conv_transpose"


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def forward(spec, x, w, bias):
    """y, in the layout of the geometry's out_spec; bias [output features] or None."""
    return forward_unit(spec)(x, w, bias)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def forward_relu(spec, x, w, bias):
    """The relu of y: the forward unit with an epilogue, which a kernel may have, and the only thing here not linear."""
    return forward_unit(spec, relu=True)(x, w, bias)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def backward_input(spec, dy, w):
    """dx, in the layout of the geometry's lhs_spec."""
    return backward_input_unit(spec)(dy, w)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def backward_filter(spec, want_bias, x, dy):
    """(dw, db), dw in the layout of the geometry's rhs_spec, db [output features] or None if not wanted."""
    return backward_filter_unit(spec, want_bias)(x, dy)


def _forward_fwd(spec, x, w, bias):
    (x, w, bias), wanted = values_and_wanted(x, w, bias)
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
    (x, w, bias), wanted = values_and_wanted(x, w, bias)
    y = checkpoint_name(forward_relu(spec, x, w, bias), _FORWARD_NAME)
    return y, (y, (x, w, wanted))


def _forward_relu_bwd(spec, residuals, dy):
    y, of_forward = residuals
    return _forward_bwd(spec, of_forward, _conv_xla.where_passed(y, dy))


def _backward_input_fwd(spec, dy, w):
    (dy, w), wanted = values_and_wanted(dy, w)
    return checkpoint_name(backward_input(spec, dy, w), _BACKWARD_INPUT_NAME), (dy, w, wanted)


def _backward_input_bwd(spec, residuals, dx):
    dy, w, wanted = residuals
    want_dy, want_w = wanted.flags
    return (
        forward(spec, dx, w, None) if want_dy else None,
        backward_filter(spec, False, dx, dy)[0] if want_w else None,
    )


def _backward_filter_fwd(spec, want_bias, x, dy):
    (x, dy), wanted = values_and_wanted(x, dy)
    return backward_filter(spec, want_bias, x, dy), (x, dy, wanted)


def _backward_filter_bwd(spec, want_bias, residuals, cotangents):
    x, dy, wanted = residuals
    want_x, want_dy = wanted.flags
    dw, db = map(instantiated, cotangents)
    x, dy, dw, db = vary_alike(x, dy, dw, db)
    return (
        backward_input(spec, dy, dw) if want_x else None,
        forward(spec, x, dw, db) if want_dy else None,
    )


forward.defvjp(_forward_fwd, _forward_bwd, symbolic_zeros=True)
forward_relu.defvjp(_forward_relu_fwd, _forward_relu_bwd, symbolic_zeros=True)
backward_input.defvjp(_backward_input_fwd, _backward_input_bwd, symbolic_zeros=True)
backward_filter.defvjp(_backward_filter_fwd, _backward_filter_bwd, symbolic_zeros=True)
