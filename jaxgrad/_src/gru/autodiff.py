"""Reverse mode of the GRU: the `jax.custom_vjp` functions around the passes."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jaxgrad._src.core.symbolic_zeros import none_if_zero, values_and_needs_grad
from jaxgrad._src.gru import passes, xla
from jaxgrad._src.gru.backend import Gradients

_CHECKPOINT_NAME = "jaxgrad.gru"  # of the residuals for policies of `jax.checkpoint`


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def gru(params, x, w, r, b, sequence_lens, initial_h):
    """Returns `(y, y_h)`. Without differentiation no residuals are computed."""
    y, y_h, _ = passes.forward(params, False)(x, w, r, b, sequence_lens, initial_h)
    return y, y_h


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def gru_and_gates(params, x, w, r, b, sequence_lens, initial_h):
    """Returns `(y, y_h, gates)`. The cotangent of `gates` is ignored: the gates are residuals, not a result."""
    return passes.forward(params, True)(x, w, r, b, sequence_lens, initial_h)


def _gru_and_gates_fwd(params, x, w, r, b, sequence_lens, initial_h):
    values, needs_grad = values_and_needs_grad(x, w, r, b, sequence_lens, initial_h)
    y, y_h, gates = checkpoint_name(gru_and_gates(params, *values), _CHECKPOINT_NAME)
    return (y, y_h, gates), (values, y, gates, needs_grad)


def _gru_fwd(params, *primals):
    (y, y_h, _), residuals = _gru_and_gates_fwd(params, *primals)
    return (y, y_h), residuals


def _gru_bwd(params, residuals, cotangents):
    (x, w, r, b, sequence_lens, initial_h), y, gates, needs_grad = residuals
    dy, dy_h = map(none_if_zero, cotangents[:2])
    flags = (*needs_grad.flags[:4], needs_grad.flags[5])  # sequence_lens has no gradient
    gradients = _gru_backward(params, flags, x, w, r, b, sequence_lens, initial_h, y, gates, dy, dy_h)
    return gradients.x, gradients.w, gradients.r, gradients.b, None, gradients.initial_h


gru.defvjp(_gru_fwd, _gru_bwd, symbolic_zeros=True)
gru_and_gates.defvjp(_gru_and_gates_fwd, _gru_bwd, symbolic_zeros=True)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _gru_backward(params, needs_grad, x, w, r, b, sequence_lens, initial_h, y, gates, dy, dy_h):
    return Gradients(*passes.backward(params, needs_grad)(x, w, r, sequence_lens, initial_h, y, gates, dy, dy_h))


def _gru_backward_fwd(params, needs_grad, *args):
    return _gru_backward(params, needs_grad, *args), args


def _gru_backward_bwd(params, needs_grad, args, cotangents):
    """Second derivatives: differentiates the reverse mode of the XLA implementation's forward scan.

    y and gates get no gradient: they are functions of the inputs, and the differentiated scan computes them again.
    """
    x, w, r, b, sequence_lens, initial_h, _, _, dy, dy_h = args

    def gradients(inputs, dy, dy_h):
        def outputs(inputs):
            x, w, r, b, initial_h = inputs
            return xla.forward(params, x, w, r, b, sequence_lens, initial_h, save_gates=False)[:2]

        (y, y_h), pullback = jax.vjp(outputs, inputs)
        (found,) = pullback((jnp.zeros_like(y) if dy is None else dy, jnp.zeros_like(y_h) if dy_h is None else dy_h))
        return Gradients(*(g if needed else None for g, needed in zip(found, needs_grad, strict=True)))

    _, pullback = jax.vjp(gradients, (x, w, r, b, initial_h), dy, dy_h)
    (x, w, r, b, initial_h), dy, dy_h = pullback(cotangents)
    return x, w, r, b, None, initial_h, None, None, dy, dy_h


_gru_backward.defvjp(_gru_backward_fwd, _gru_backward_bwd)
