"""Forward mode of batch normalization: on a CPU, tangents run on the kernels of the passes.

With xhat = (x - mean) rstd, and sums over the n elements of a channel, the tangents along x', scale' and bias' are

  y' = scale rstd (x' - sum x' / n - xhat sum(xhat x') / n) + scale' xhat + bias'
  mean' = sum x' / n, var' = 2 sum(xhat x') / (n rstd)

The map from x' to y' is its own transpose: it is the backward pass with the cotangent x', whose gradients of bias and
scale are the two sums. The other terms of y' are a normalization by scale' and bias'. On other platforms XLA computes
the tangents, whatever implementation computes the value.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from jaxgrad._src.batch_norm import passes, xla
from jaxgrad._src.batch_norm.backend import Statistics, compute_dtype
from jaxgrad._src.batch_norm.params import BatchNormParams
from jaxgrad._src.choice.candidates import Candidates
from jaxgrad._src.run.derivative_maps import JvpRules


def _training(params, primals, tangents):
    x, scale, bias, residual = primals
    dx, dscale, dbias, dresidual = tangents
    dtype = compute_dtype(x)
    scale, bias = scale.astype(dtype), bias.astype(dtype)
    y, mean, mean_low, _, rstd = passes.forward(params)(x, scale, bias, residual)  # the same call as for the value
    statistics = Statistics(mean, mean_low, rstd)
    linear = _linear(params)
    dmean = dvar = jnp.zeros_like(mean)
    dy = None
    if dx is not None:
        backward = passes.backward(linear, (True, True, True, False))
        dy, sum_xhat, sum_x, _ = backward(x, scale, None, *statistics, None, dx, None, None)
        n = max(x.size // max(x.shape[params.feature_axis], 1), 1)
        dmean, dvar = params.pmean((sum_x / n, 2 * sum_xhat / (n * rstd)))
    dy = _add_affine(linear, x, dscale, dbias, statistics, dy)
    if dresidual is not None:
        dy = dresidual if dy is None else (dy.astype(dtype) + dresidual.astype(dtype)).astype(x.dtype)
    if params.relu:
        y = None if residual is None else y  # as in the backward pass
        dy = jnp.where(xla.relu_mask(params, x, scale, bias, statistics, y), dy, 0)
    return dy, dmean.astype(params.statistics_dtype), dvar.astype(params.statistics_dtype)


def _inference(params, primals, tangents):
    """mean' is a part of bias', and var' a part of scale', because rstd' = -rstd^3 var' / 2."""
    x, scale, _, mean, var = primals
    dx, dscale, dbias, dmean, dvar = tangents
    dtype = compute_dtype(x)
    scale, mean, var = (a.astype(dtype) for a in (scale, mean, var))
    rstd = lax.rsqrt(var + params.epsilon)
    params = _linear(params)
    dy = None
    if dx is not None:
        backward = passes.backward(params, (True, False, False, False))
        dy = backward(x, scale, None, mean, None, rstd, None, dx, None, None)[0]
    if dvar is not None:
        through = -scale * rstd * rstd * dvar.astype(dtype) / 2
        dscale = through if dscale is None else dscale.astype(dtype) + through
    if dmean is not None:
        through = -scale * rstd * dmean.astype(dtype)
        dbias = through if dbias is None else dbias.astype(dtype) + through
    return _add_affine(params, x, dscale, dbias, Statistics(mean, None, rstd), dy)


def _linear(params: BatchNormParams) -> BatchNormParams:
    """Returns params for passes that are linear in the tangents, on backends with kernels for the single steps."""

    def unforced(candidates: Candidates) -> Candidates:
        return dataclasses.replace(passes.two_step_candidates(candidates), forced=None)

    return dataclasses.replace(
        params,
        relu=False,
        residual=False,
        forward_candidates=unforced(params.forward_candidates),
        backward_candidates=unforced(params.backward_candidates),
    )


def _add_affine(params, x, dscale, dbias, statistics, dy):
    """Returns dy + dscale xhat + dbias; None if all three are None."""
    if dscale is None and dbias is None:
        return dy
    zero = jnp.zeros_like(statistics.mean)
    dscale, dbias = (zero if d is None else d.astype(zero.dtype) for d in (dscale, dbias))
    return passes.normalize(params)(x, dscale, dbias, *statistics, dy)[0]


def training_formula(params, x, scale, bias, residual):
    """Returns `(y, mean, var)` in plain JAX."""
    y, mean, var = xla.formula(params, x, scale, bias)
    y = y if residual is None else y + residual.astype(y.dtype)
    y = jax.nn.relu(y) if params.relu else y
    return y.astype(x.dtype), mean.astype(params.statistics_dtype), var.astype(params.statistics_dtype)


def _inference_formula(params, x, scale, bias, mean, var):
    return xla.formula(params, x, scale, bias, (mean, var))[0].astype(x.dtype)


TRAINING_RULES = JvpRules(_training, training_formula)
INFERENCE_RULES = JvpRules(_inference, _inference_formula)
