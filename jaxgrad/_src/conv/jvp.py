"""Forward mode of convolution: the passes are bilinear, so each tangent is a sum of calls of the same passes.

The tangent of relu is the tangent of its argument where the result is positive.
"""

from __future__ import annotations

import jax.numpy as jnp

from jaxgrad._src.conv import autodiff
from jaxgrad._src.conv.on_xla.xla import add_bias, relu_grad
from jaxgrad._src.run.derivative_maps import JvpRules


def _forward(params, primals, tangents):
    x, w, _ = primals
    dx, dw, dbias = tangents
    terms = []
    if dw is not None:
        terms.append(autodiff.forward(params, x, dw, dbias))
    if dx is not None:
        terms.append(autodiff.forward(params, dx, w, dbias if dw is None else None))
    if terms:
        return sum(terms[1:], terms[0])
    y = jnp.zeros_like(autodiff.forward(params, x, w, None))  # for its shape only: XLA removes the convolution
    return add_bias(y, dbias, params.geometry.out_spec)


def _forward_relu(params, primals, tangents):
    y = autodiff.forward_relu(params, *primals)  # XLA merges this call with the call that computes the value
    return relu_grad(y, _forward(params, primals, tangents))


def _input_gradient(params, primals, tangents):
    dy, w = primals
    d_dy, dw = tangents
    terms = []
    if d_dy is not None:
        terms.append(autodiff.input_gradient(params, d_dy, w))
    if dw is not None:
        terms.append(autodiff.input_gradient(params, dy, dw))
    return sum(terms[1:], terms[0])


FORWARD, FORWARD_RELU = JvpRules(tangent=_forward), JvpRules(tangent=_forward_relu)
INPUT_GRADIENT = JvpRules(tangent=_input_gradient)
