"""Reverse mode of the GRU: the `jax.custom_vjp` functions around the passes."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jaxgrad._src.gru import passes, xla
from jaxgrad._src.gru.backend import Gradients
from jaxgrad._src.run.symbolic_zeros import none_if_zero, values_and_needs_grad

_CHECKPOINT_NAME = "jaxgrad.gru"  # of the residuals for policies of `jax.checkpoint`


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def gru(params, *operands):
    """Returns `(y, y_h)`. Without differentiation no residuals are computed."""
    y, y_h, _ = passes.forward(params, False)(*operands)
    return y, y_h


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def gru_and_gates(params, *operands):
    """Returns `(y, y_h, gates)`. The cotangent of `gates` is ignored: the gates are residuals, not a result."""
    return passes.forward(params, True)(*operands)


def _gru_and_gates_fwd(params, *primals):
    values, needs_grad = values_and_needs_grad(*primals)
    y, y_h, gates = checkpoint_name(gru_and_gates(params, *values), _CHECKPOINT_NAME)
    return (y, y_h, gates), (values, y, gates, needs_grad)


def _gru_fwd(params, *primals):
    (y, y_h, _), residuals = _gru_and_gates_fwd(params, *primals)
    return (y, y_h), residuals


def _gru_bwd(params, residuals, cotangents):
    operands, y, gates, needs_grad = residuals
    dy, dy_h = map(none_if_zero, cotangents[:2])
    flags = Gradients.fields_of(needs_grad.flags)
    return _gru_backward(params, flags, *operands, y, gates, dy, dy_h).of_operands()


gru.defvjp(_gru_fwd, _gru_bwd, symbolic_zeros=True)
gru_and_gates.defvjp(_gru_and_gates_fwd, _gru_bwd, symbolic_zeros=True)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _gru_backward(params, needs_grad, x, w, r, b, *others):
    return Gradients(*passes.backward(params, needs_grad)(x, w, r, *others))


def _gru_backward_fwd(params, needs_grad, *args):
    return _gru_backward(params, needs_grad, *args), args


def _gru_backward_bwd(params, needs_grad, args, cotangents):
    """Second derivatives: differentiates the reverse mode of the XLA implementation's forward scan.

    y and gates get no gradient: they are functions of the inputs, and the differentiated scan computes them again.
    """
    x, w, r, b, sequence_lens, initial_h, reset, reset_h, _, _, dy, dy_h = args

    def gradients(inputs, dy, dy_h):
        def outputs(inputs):
            x, w, r, b, initial_h, reset_h = inputs
            return xla.forward(params, x, w, r, b, sequence_lens, initial_h, reset, reset_h, save_gates=False)[:2]

        (y, y_h), pullback = jax.vjp(outputs, inputs)
        (found,) = pullback((jnp.zeros_like(y) if dy is None else dy, jnp.zeros_like(y_h) if dy_h is None else dy_h))
        return Gradients(*(g if needed else None for g, needed in zip(found, needs_grad, strict=True)))

    _, pullback = jax.vjp(gradients, (x, w, r, b, initial_h, reset_h), dy, dy_h)
    found, dy, dy_h = pullback(cotangents)
    return *Gradients(*found).of_operands(), None, None, dy, dy_h


_gru_backward.defvjp(_gru_backward_fwd, _gru_backward_bwd)
