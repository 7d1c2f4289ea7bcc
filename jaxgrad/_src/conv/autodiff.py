"""The differentiation rules of convolution: three bilinear passes, each the `jax.custom_vjp` of the other two.

  forward(x, w, bias)      y = conv(x, w) + bias
  input_gradient(dy, w)    dx, the transpose of conv in x
  weight_gradient(x, dy)   dw and db, the transpose of conv in w and bias

The derivatives of each pass are the other two, so gradients of any order run on the same kernels. A transposed
convolution is input_gradient, read as an op. forward_relu(x, w, bias) is relu(forward(x, w, bias)); its derivatives are
those of forward with a dy that is zero where y is.
"""

from __future__ import annotations

from functools import partial

import jax
from jax.ad_checkpoint import checkpoint_name

from jaxgrad._src.conv.on_xla.xla import bias_gradient, relu_grad
from jaxgrad._src.conv.passes import forward_pass, input_gradient_pass, weight_gradient_pass
from jaxgrad._src.run.mesh_axes import pvary_to_match
from jaxgrad._src.run.symbolic_zeros import instantiate_zeros, values_and_needs_grad

# The names by which policies of `jax.checkpoint` select the differentiated results.
_FORWARD_NAME, _INPUT_GRADIENT_NAME = "jaxgrad.conv_general_dilated", "jaxgrad.conv_transpose"


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def forward(params, x, w, bias):
    """y, in the layout out_spec of the geometry; bias: [output features] or None."""
    return forward_pass(params)(x, w, bias)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def forward_relu(params, x, w, bias):
    """The relu of y. A kernel may fuse it. This is the only function here that is not linear."""
    return forward_pass(params, relu=True)(x, w, bias)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def input_gradient(params, dy, w):
    """dx, in the layout lhs_spec of the geometry."""
    return input_gradient_pass(params)(dy, w)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def weight_gradient(params, needs_bias_gradient, x, dy):
    """dw, in the layout rhs_spec of the geometry, and db: [output features], or None if it is not needed."""
    return weight_gradient_pass(params, needs_bias_gradient)(x, dy)


def _forward_fwd(params, x, w, bias):
    (x, w, bias), needs_grad = values_and_needs_grad(x, w, bias)
    return checkpoint_name(forward(params, x, w, bias), _FORWARD_NAME), (x, w, needs_grad)


def _forward_bwd(params, residuals, dy):
    x, w, needs_grad = residuals
    needs_dx, needs_dw, needs_bias_gradient = needs_grad.flags
    dx = input_gradient(params, dy, w) if needs_dx else None
    dw = db = None
    if needs_dw:
        dw, db = weight_gradient(params, needs_bias_gradient, x, dy)
    elif needs_bias_gradient:
        db = bias_gradient(params.geometry, dy)
    return dx, dw, db


def _forward_relu_fwd(params, x, w, bias):
    (x, w, bias), needs_grad = values_and_needs_grad(x, w, bias)
    y = checkpoint_name(forward_relu(params, x, w, bias), _FORWARD_NAME)
    return y, (y, (x, w, needs_grad))


def _forward_relu_bwd(params, residuals, dy):
    y, forward_residuals = residuals
    return _forward_bwd(params, forward_residuals, relu_grad(y, dy))


def _input_gradient_fwd(params, dy, w):
    (dy, w), needs_grad = values_and_needs_grad(dy, w)
    return checkpoint_name(input_gradient(params, dy, w), _INPUT_GRADIENT_NAME), (dy, w, needs_grad)


def _input_gradient_bwd(params, residuals, dx):
    dy, w, needs_grad = residuals
    needs_ddy, needs_dw = needs_grad.flags
    return (
        forward(params, dx, w, None) if needs_ddy else None,
        weight_gradient(params, False, dx, dy)[0] if needs_dw else None,
    )


def _weight_gradient_fwd(params, needs_bias_gradient, x, dy):
    (x, dy), needs_grad = values_and_needs_grad(x, dy)
    return weight_gradient(params, needs_bias_gradient, x, dy), (x, dy, needs_grad)


def _weight_gradient_bwd(params, needs_bias_gradient, residuals, cotangents):
    x, dy, needs_grad = residuals
    needs_dx, needs_ddy = needs_grad.flags
    dw, db = map(instantiate_zeros, cotangents)
    x, dy, dw, db = pvary_to_match(x, dy, dw, db)
    return (
        input_gradient(params, dy, dw) if needs_dx else None,
        forward(params, x, dw, db) if needs_ddy else None,
    )


forward.defvjp(_forward_fwd, _forward_bwd, symbolic_zeros=True)
forward_relu.defvjp(_forward_relu_fwd, _forward_relu_bwd, symbolic_zeros=True)
input_gradient.defvjp(_input_gradient_fwd, _input_gradient_bwd, symbolic_zeros=True)
weight_gradient.defvjp(_weight_gradient_fwd, _weight_gradient_bwd, symbolic_zeros=True)
