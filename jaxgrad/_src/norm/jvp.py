"""Forward mode of normalization: tangents run on the kernels of the passes.

With xhat = (x - mean) rstd, and sums over the n elements of a group, the tangents along x', scale' and bias' are

  y' = scale rstd (x' - sum x' / n - xhat sum(xhat x') / n) + scale' xhat + bias'
  mean' = sum x' / n, var' = 2 sum(xhat x') / (n rstd)

With a scale of ones, the map from x' to y' is its own transpose: it is the backward pass with the cotangent x'. Its
gradients of bias and scale are the two sums, where each channel has statistics of its own. The other terms of y' are a
normalization by scale' and bias'. The derivative of the activation multiplies them all. cuDNN has no kernels for
the single steps: XLA computes the tangents where cuDNN computes the value.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jax import lax

from jaxgrad._src.choice.candidates import Candidates
from jaxgrad._src.norm import passes, xla
from jaxgrad._src.norm.backend import Statistics, compute_dtype
from jaxgrad._src.norm.params import NormParams
from jaxgrad._src.run.derivative_maps import JvpRules


def _training(params, primals, tangents):
    x, scale, bias, residual = primals
    dx, dscale, dbias, dresidual = tangents
    dtype = compute_dtype(x)
    scale, bias = scale.astype(dtype), bias.astype(dtype)
    y, mean, mean_low, var, rstd = passes.forward(params)(x, scale, bias, residual)  # the same call as for the value
    statistics = Statistics(mean, mean_low, rstd)
    linear = _linear(params)
    dmean = dvar = None if params.statistics_dtype is None else jnp.zeros_like(var)
    dy = None
    if dx is not None:
        # Without groups, scale is the same in each sum, and is a factor of dx as well as of y'.
        own = params.num_groups is None
        backward = passes.backward(linear, (True, True, True, False))
        factor = scale if own else jnp.ones_like(scale)
        dy, sum_xhat, sum_x, _ = backward(x, factor, None, *statistics, None, None, dx, None, None)
        if not own:
            dy = (dy.astype(dtype) * xla.expand(params, scale, x)).astype(x.dtype)
        if dmean is not None:
            n = max(x.size // max(x.shape[params.feature_axis], 1), 1)
            dmean, dvar = params.pmean((sum_x / n, 2 * sum_xhat / (n * rstd)))
    dy = _add_affine(linear, x, dscale, dbias, statistics, dy)
    if dresidual is not None:
        dy = dresidual if dy is None else (dy.astype(dtype) + dresidual.astype(dtype)).astype(x.dtype)
    if params.activation is not None:
        y = y if params.activation == "relu" and residual is not None else None  # as in the backward pass
        dy = xla.through_activation(params, x, scale, bias, statistics, y, residual, dy).astype(x.dtype)
    return params.results(dy, dmean, dvar)


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
        dy = backward(x, scale, None, mean, None, rstd, None, None, dx, None, None)[0]
    if dvar is not None:
        through = -scale * rstd * rstd * dvar.astype(dtype) / 2
        dscale = through if dscale is None else dscale.astype(dtype) + through
    if dmean is not None:
        through = -scale * rstd * dmean.astype(dtype)
        dbias = through if dbias is None else dbias.astype(dtype) + through
    return _add_affine(params, x, dscale, dbias, Statistics(mean, None, rstd), dy)


def _linear(params: NormParams) -> NormParams:
    """Returns params for passes that are linear in the tangents, on backends with kernels for the single steps."""

    def unforced(candidates: Candidates) -> Candidates:
        return dataclasses.replace(passes.two_step_candidates(candidates), forced=None)

    return dataclasses.replace(
        params,
        activation=None,
        residual=False,
        forward_candidates=unforced(params.forward_candidates),
        backward_candidates=unforced(params.backward_candidates),
    )


def _add_affine(params, x, dscale, dbias, statistics, dy):
    """Returns dy + dscale xhat + dbias; None if all three are None."""
    if dscale is None and dbias is None:
        return dy
    zero = jnp.zeros(x.shape[params.feature_axis], compute_dtype(x))
    dscale, dbias = (zero if d is None else d.astype(zero.dtype) for d in (dscale, dbias))
    return passes.normalize(params)(x, dscale, dbias, *statistics, dy)[0]


def training_formula(params, x, scale, bias, residual):
    """Returns `(y, mean, var)` in plain JAX."""
    z, mean, var = xla.formula(params, x, scale, bias)
    z = z if residual is None else z + residual.astype(z.dtype)
    return params.results(xla.activate(params, z).astype(x.dtype), mean, var)


def _inference_formula(params, x, scale, bias, mean, var):
    return xla.formula(params, x, scale, bias, (mean, var))[0].astype(x.dtype)


TRAINING_RULES = JvpRules(_training, training_formula)
INFERENCE_RULES = JvpRules(_inference, _inference_formula)
