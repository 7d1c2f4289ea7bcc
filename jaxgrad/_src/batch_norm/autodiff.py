"""The differentiation rules of batch normalisation: the `jax.custom_vjp` functions around the calls of
`_batch_norm_units`."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jaxgrad import _batch_norm_units as units
from jaxgrad import _batch_norm_xla
from jaxgrad._batch_norm_xla import Gradients, Statistics, compute_dtype
from jaxgrad._symbolic_zeros import known, values_and_wanted

# What policies of `jax.checkpoint` know the differentiated results by.
_TRAINING_NAME, _INFERENCE_NAME = "jaxgrad.batch_norm_training", "jaxgrad.batch_norm_inference"


# --- batch statistics ---------------------------------------------------------------------------------------------


def _forward(spec, x, scale, bias, residual):
    """`((y, mean, var), statistics)`"""
    dtype = compute_dtype(x)
    y, mean, mean_low, var, rstd = units.forward(spec)(x, scale.astype(dtype), bias.astype(dtype), residual)
    results = (y, mean.astype(spec.statistics_dtype), var.astype(spec.statistics_dtype))
    return results, Statistics(mean, mean_low, rstd)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def training(spec, x, scale, bias, residual):
    """`(y, mean, var)`"""
    return _forward(spec, x, scale, bias, residual)[0]


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _training_with_residuals(spec, x, scale, bias, residual):
    """`((y, mean, var), statistics)`; the rules never differentiate the statistics that the backward pass reads, for
    it follows the inputs, which they depend on."""
    return _forward(spec, x, scale, bias, residual)


def _with_residuals_fwd(spec, x, scale, bias, residual):
    (x, scale, bias, residual), wanted = values_and_wanted(x, scale, bias, residual)
    results, statistics = checkpoint_name(_training_with_residuals(spec, x, scale, bias, residual), _TRAINING_NAME)
    # relu's argument is computed anew from the bias, or read off the sign of y where a residual went into it.
    saved_y = results[0] if spec.relu and residual is not None else None
    saved_bias = bias if spec.relu and residual is None else None
    return (results, statistics), (x, scale, saved_bias, statistics, saved_y, wanted)


def _training_fwd(spec, *primals):
    (results, _), residuals = _with_residuals_fwd(spec, *primals)
    return results, residuals


def _training_bwd(spec, residuals, cotangents):
    x, scale, bias, statistics, y, wanted = residuals
    dtype = compute_dtype(x)
    dy, dmean, dvar = map(known, cotangents)
    dmean, dvar = (None if c is None else c.astype(dtype) for c in (dmean, dvar))
    # Without an activation the residual's gradient is dy itself.
    flags = (*wanted.flags[:3], wanted.flags[3] and spec.relu)
    wide_bias = None if bias is None else bias.astype(dtype)
    found = _training_backward(spec, flags, x, scale.astype(dtype), wide_bias, statistics, y, dy, dmean, dvar)
    dscale, dbias = (None if g is None else g.astype(scale.dtype) for g in (found.scale, found.bias))
    return found.x, dscale, dbias, (found.residual if spec.relu else dy) if wanted.flags[3] else None


def _with_residuals_bwd(spec, residuals, cotangents):
    return _training_bwd(spec, residuals, cotangents[0])


training.defvjp(_training_fwd, _training_bwd, symbolic_zeros=True)
_training_with_residuals.defvjp(_with_residuals_fwd, _with_residuals_bwd, symbolic_zeros=True)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _training_backward(spec, wanted, x, scale, bias, statistics, y, dy, dmean, dvar):
    """The arrays of [C] are of the compute dtype here, and so are their gradients."""
    return Gradients(*units.backward(spec, False, wanted)(x, scale, bias, *statistics, y, dy, dmean, dvar))


def _training_backward_fwd(spec, wanted, *args):
    return _training_backward(spec, wanted, *args), args


def _training_backward_bwd(spec, wanted, args, cotangents):
    """Gradients of gradients, by differentiating XLA's own backward pass.

    Where relu passed its argument on is constant almost everywhere, and the bias shifts y alone. The statistics and y
    get no gradient: they are functions of the inputs, and what is differentiated here computes them anew.
    """
    x, scale, bias, statistics, y, dy, dmean, dvar = args
    passed = None
    if spec.relu:
        passed = _batch_norm_xla.passed(x, scale, bias, statistics, y, feature_axis=spec.feature_axis)
    settings: dict[str, Any] = {"feature_axis": spec.feature_axis, "epsilon": spec.epsilon, "over": spec.over}
    plain = partial(_batch_norm_xla.plain, statistics=None, **settings)

    def gradients(x, scale, dy, dmean, dvar):
        results, pullback = jax.vjp(plain, x, scale, jnp.zeros_like(scale))
        g, dmean, dvar = (
            jnp.zeros_like(r) if c is None else c.astype(r.dtype)
            for r, c in zip(results, (dy, dmean, dvar), strict=True)
        )
        g = g if passed is None else jnp.where(passed, g, 0)
        found = (*pullback((g, dmean, dvar)), g.astype(x.dtype))
        return Gradients(*(gradient if want else None for gradient, want in zip(found, wanted, strict=True)))

    _, pullback = jax.vjp(gradients, x, scale, dy, dmean, dvar)
    x, scale, dy, dmean, dvar = pullback(cotangents)
    return x, scale, None, None, None, dy, dmean, dvar


_training_backward.defvjp(_training_backward_fwd, _training_backward_bwd)


# --- frozen statistics --------------------------------------------------------------------------------------------


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def inference(spec, x, scale, bias, mean, var):
    """y"""
    dtype = compute_dtype(x)
    scale, bias, mean, var = (a.astype(dtype) for a in (scale, bias, mean, var))
    (y,) = units.normalise(spec)(x, scale, bias, mean, None, lax.rsqrt(var + spec.epsilon), None)
    return y


def _inference_fwd(spec, *primals):
    (x, scale, bias, mean, var), wanted = values_and_wanted(*primals)
    y = checkpoint_name(inference(spec, x, scale, bias, mean, var), _INFERENCE_NAME)
    return y, (x, scale, mean, var, wanted)


def _inference_bwd(spec, residuals, dy):
    x, scale, mean, var, wanted = residuals
    if known(dy) is None:
        return (None,) * 5
    return _inference_backward(spec, wanted.flags, x, scale, mean, var, dy)


inference.defvjp(_inference_fwd, _inference_bwd, symbolic_zeros=True)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _inference_backward(spec, wanted, x, scale, mean, var, dy):
    """The gradients of (x, scale, bias, mean, var), None where not wanted.

    With r = 1 / sqrt(var + epsilon): dmean = -scale r dbias and dvar = -scale r^2 dscale / 2.
    """
    dtype = compute_dtype(x)
    want_x, want_scale, want_bias, want_mean, want_var = wanted
    wide_scale, wide_mean, wide_var = (a.astype(dtype) for a in (scale, mean, var))
    rstd = lax.rsqrt(wide_var + spec.epsilon)
    unit = units.backward(spec, True, (want_x, want_scale or want_var, want_bias or want_mean, False))
    dx, dscale, dbias, _ = unit(x, wide_scale, None, wide_mean, None, rstd, None, dy, None, None)
    return (
        dx,
        dscale.astype(scale.dtype) if want_scale else None,
        dbias.astype(scale.dtype) if want_bias else None,
        (-wide_scale * rstd * dbias).astype(mean.dtype) if want_mean else None,
        (-wide_scale * rstd * rstd * dscale / 2).astype(var.dtype) if want_var else None,
    )


def _inference_backward_fwd(spec, wanted, *args):
    return _inference_backward(spec, wanted, *args), args


def _inference_backward_bwd(spec, wanted, args, cotangents):
    """Gradients of gradients, by differentiating XLA's own backward pass."""

    def gradients(x, scale, mean, var, dy):
        def y(x, scale, bias, mean, var):
            settings = {"feature_axis": spec.feature_axis, "epsilon": spec.epsilon}
            return _batch_norm_xla.plain(x, scale, bias, (mean, var), **settings)[0]

        _, pullback = jax.vjp(y, x, scale, jnp.zeros_like(scale), mean, var)
        found = pullback(dy.astype(compute_dtype(x)))
        return tuple(gradient if want else None for gradient, want in zip(found, wanted, strict=True))

    _, pullback = jax.vjp(gradients, *args)
    return pullback(cotangents)


_inference_backward.defvjp(_inference_backward_fwd, _inference_backward_bwd)
