"""The tangents of convolution: the triangle's units are bilinear, so that each tangent is a sum of the same units.

A relu passes such a sum on where it passed the value on.
"""

from __future__ import annotations

import jax.numpy as jnp

from jaxgrad import _conv_triangle, _conv_xla
from jaxgrad._forward_maps import Rules


def _forward(spec, primals, tangents):
    x, w, _ = primals
    dx, dw, dbias = tangents
    terms = []
    if dw is not None:
        terms.append(_conv_triangle.forward(spec, x, dw, dbias))
    if dx is not None:
        terms.append(_conv_triangle.forward(spec, dx, w, dbias if dw is None else None))
    if terms:
        return sum(terms[1:], terms[0])
    y = jnp.zeros_like(_conv_triangle.forward(spec, x, w, None))  # its shape alone: XLA runs no convolution for it
    return _conv_xla.add_bias(y, dbias, spec.geometry.out_spec)


def _forward_relu(spec, primals, tangents):
    y = _conv_triangle.forward_relu(spec, *primals)  # the call that the value makes too
    return _conv_xla.where_passed(y, _forward(spec, primals, tangents))


def _backward_input(spec, primals, tangents):
    dy, w = primals
    d_dy, dw = tangents
    terms = []
    if d_dy is not None:
        terms.append(_conv_triangle.backward_input(spec, d_dy, w))
    if dw is not None:
        terms.append(_conv_triangle.backward_input(spec, dy, dw))
    return sum(terms[1:], terms[0])


FORWARD, FORWARD_RELU = Rules(tangent=_forward), Rules(tangent=_forward_relu)
BACKWARD_INPUT = Rules(tangent=_backward_input)
