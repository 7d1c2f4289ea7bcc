"""Reverse mode of normalization: the `jax.custom_vjp` functions around the passes."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jaxgrad._src.norm import passes, xla
from jaxgrad._src.norm.backend import Gradients, Statistics, compute_dtype
from jaxgrad._src.run.symbolic_zeros import none_if_zero, values_and_needs_grad

# Statistics of the operand itself. For policies of `jax.checkpoint`, the residuals have the name of the op.


def _forward(params, x, scale, bias, residual):
    """Returns `((y, mean, var), statistics)`; mean and var are None for ops that do not return them."""
    dtype = compute_dtype(x)
    y, mean, mean_low, var, rstd = passes.forward(params)(x, scale.astype(dtype), bias.astype(dtype), residual)
    return params.results(y, mean, var), Statistics(mean, mean_low, rstd)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def training(params, x, scale, bias, residual):
    """Returns `(y, mean, var)`."""
    return _forward(params, x, scale, bias, residual)[0]


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _training_with_residuals(params, x, scale, bias, residual):
    """Returns `((y, mean, var), statistics)`. The statistics are residuals, whose cotangents are ignored."""
    return _forward(params, x, scale, bias, residual)


def _with_residuals_fwd(params, x, scale, bias, residual):
    (x, scale, bias, residual), needs_grad = values_and_needs_grad(x, scale, bias, residual)
    found = _training_with_residuals(params, x, scale, bias, residual)
    results, statistics = checkpoint_name(found, f"jaxgrad.{params.op}")
    # The backward pass computes the argument of the activation again, which reads the bias, or reads the sign of the
    # argument of relu from y, which holds the residual too.
    reads_y = params.activation == "relu" and residual is not None
    saved_y = results[0] if reads_y else None
    saved_bias = bias if params.activation is not None and not reads_y else None
    saved_residual = residual if params.has_smooth_activation else None
    return (results, statistics), (x, scale, saved_bias, statistics, saved_y, saved_residual, needs_grad)


def _training_fwd(params, *primals):
    (results, _), residuals = _with_residuals_fwd(params, *primals)
    return results, residuals


def _training_bwd(params, residuals, cotangents):
    x, scale, bias, statistics, y, residual, needs_grad = residuals
    dtype = compute_dtype(x)
    dy, dmean, dvar = map(none_if_zero, cotangents)
    dmean, dvar = (None if c is None else c.astype(dtype) for c in (dmean, dvar))
    # Without an activation the gradient of the residual is dy itself.
    is_linear = params.activation is None
    flags = (*needs_grad.flags[:3], needs_grad.flags[3] and not is_linear)
    wide_bias = None if bias is None else bias.astype(dtype)
    found = _training_backward(
        params, flags, x, scale.astype(dtype), wide_bias, statistics, y, residual, dy, dmean, dvar
    )
    dscale, dbias = (None if g is None else g.astype(scale.dtype) for g in (found.scale, found.bias))
    return found.x, dscale, dbias, (dy if is_linear else found.residual) if needs_grad.flags[3] else None


def _with_residuals_bwd(params, residuals, cotangents):
    return _training_bwd(params, residuals, cotangents[0])


training.defvjp(_training_fwd, _training_bwd, symbolic_zeros=True)
_training_with_residuals.defvjp(_with_residuals_fwd, _with_residuals_bwd, symbolic_zeros=True)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _training_backward(params, needs_grad, x, scale, bias, statistics, y, residual, dy, dmean, dvar):
    """[C] arrays and their gradients have the compute dtype."""
    return Gradients(*passes.backward(params, needs_grad)(x, scale, bias, *statistics, y, residual, dy, dmean, dvar))


def _training_backward_fwd(params, needs_grad, *args):
    return _training_backward(params, needs_grad, *args), args


def _training_backward_bwd(params, needs_grad, args, cotangents):
    """Second derivatives: differentiates the reverse mode of the textbook formula.

    The mask of relu is constant almost everywhere, and the gradients do not depend on bias and residual otherwise. The
    statistics and y get no gradient: they are functions of the inputs, and the formula computes them again.
    """
    x, scale, bias, statistics, y, residual, dy, dmean, dvar = args
    mask = xla.relu_mask(params, x, scale, bias, statistics, y) if params.activation == "relu" else None

    def gradients(x, scale, bias, residual, dy, dmean, dvar):
        def results(x, scale, bias, residual):
            z, mean, var = xla.formula(params, x, scale, bias)
            z = z + residual.astype(z.dtype)
            return z if mask is not None else xla.activate(params, z), mean, var

        addend = jnp.zeros_like(x) if residual is None else residual
        found, pullback = jax.vjp(results, x, scale, jnp.zeros_like(scale) if bias is None else bias, addend)
        given = (dy if mask is None or dy is None else jnp.where(mask, dy, 0)), dmean, dvar
        found = pullback(
            tuple(
                None if r is None else jnp.zeros_like(r) if c is None else c.astype(r.dtype)
                for r, c in zip(found, given, strict=True)
            )
        )
        return Gradients(*(gradient if needed else None for gradient, needed in zip(found, needs_grad, strict=True)))

    _, pullback = jax.vjp(gradients, x, scale, bias, residual, dy, dmean, dvar)
    x, scale, bias, residual, dy, dmean, dvar = pullback(cotangents)
    return x, scale, bias, None, None, residual, dy, dmean, dvar


_training_backward.defvjp(_training_backward_fwd, _training_backward_bwd)


# Frozen statistics.


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def inference(params, x, scale, bias, mean, var):
    """Returns y."""
    dtype = compute_dtype(x)
    scale, bias, mean, var = (a.astype(dtype) for a in (scale, bias, mean, var))
    (y,) = passes.normalize(params)(x, scale, bias, mean, None, lax.rsqrt(var + params.epsilon), None)
    return y


def _inference_fwd(params, *primals):
    (x, scale, bias, mean, var), needs_grad = values_and_needs_grad(*primals)
    y = checkpoint_name(inference(params, x, scale, bias, mean, var), f"jaxgrad.{params.op}")
    return y, (x, scale, mean, var, needs_grad)


def _inference_bwd(params, residuals, dy):
    x, scale, mean, var, needs_grad = residuals
    if none_if_zero(dy) is None:
        return (None,) * 5
    return _inference_backward(params, needs_grad.flags, x, scale, mean, var, dy)


inference.defvjp(_inference_fwd, _inference_bwd, symbolic_zeros=True)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _inference_backward(params, needs_grad, x, scale, mean, var, dy):
    """Returns the gradients that are needed of (x, scale, bias, mean, var); None for the others.

    With rstd = 1 / sqrt(var + epsilon): dmean = -scale rstd dbias and dvar = -scale rstd^2 dscale / 2.
    """
    dtype = compute_dtype(x)
    needs_dx, needs_dscale, needs_dbias, needs_dmean, needs_dvar = needs_grad
    wide_scale, wide_mean, wide_var = (a.astype(dtype) for a in (scale, mean, var))
    rstd = lax.rsqrt(wide_var + params.epsilon)
    backward = passes.backward(params, (needs_dx, needs_dscale or needs_dvar, needs_dbias or needs_dmean, False))
    dx, dscale, dbias, _ = backward(x, wide_scale, None, wide_mean, None, rstd, None, None, dy, None, None)
    return (
        dx,
        dscale.astype(scale.dtype) if needs_dscale else None,
        dbias.astype(scale.dtype) if needs_dbias else None,
        (-wide_scale * rstd * dbias).astype(mean.dtype) if needs_dmean else None,
        (-wide_scale * rstd * rstd * dscale / 2).astype(var.dtype) if needs_dvar else None,
    )


def _inference_backward_fwd(params, needs_grad, *args):
    return _inference_backward(params, needs_grad, *args), args


def _inference_backward_bwd(params, needs_grad, args, cotangents):
    """Second derivatives: differentiates the reverse mode of the textbook formula."""

    def gradients(x, scale, mean, var, dy):
        def y(x, scale, bias, mean, var):
            return xla.formula(params, x, scale, bias, (mean, var))[0]

        _, pullback = jax.vjp(y, x, scale, jnp.zeros_like(scale), mean, var)
        found = pullback(dy.astype(compute_dtype(x)))
        return tuple(gradient if needed else None for gradient, needed in zip(found, needs_grad, strict=True))

    _, pullback = jax.vjp(gradients, *args)
    return pullback(cotangents)


_inference_backward.defvjp(_inference_backward_fwd, _inference_backward_bwd)
