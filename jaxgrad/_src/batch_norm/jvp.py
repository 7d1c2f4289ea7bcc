"""The tangents of batch normalisation, on the CPU on the kernels of its value and of its gradients.

With xhat = (x - mean) rstd, and sums over the n elements of a channel, the tangents along x', scale', bias' are

  y' = scale rstd (x' - sum x' / n - xhat sum(xhat x') / n) + scale' xhat + bias'
  mean' = sum x' / n, var' = 2 sum(xhat x') / (n rstd)

What x' adds to y' is what the backward pass makes of a cotangent x', since that map is its own transpose, and the sums
are the gradients of bias and scale there; the rest of y' is a normalisation by scale' and bias'. On other platforms
XLA computes them, whatever the value runs on.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from jaxgrad import _batch_norm_units as units
from jaxgrad import _batch_norm_xla
from jaxgrad._batch_norm_units import Spec
from jaxgrad._batch_norm_xla import Statistics, compute_dtype
from jaxgrad._dispatch import Route
from jaxgrad._forward_maps import Rules


def _training(spec, primals, tangents):
    x, scale, bias, residual = primals
    dx, dscale, dbias, dresidual = tangents
    dtype = compute_dtype(x)
    scale, bias = scale.astype(dtype), bias.astype(dtype)
    y, mean, mean_low, _, rstd = units.forward(spec)(x, scale, bias, residual)  # the call that the value makes too
    statistics = Statistics(mean, mean_low, rstd)
    linear = _linear(spec)
    dmean = dvar = jnp.zeros_like(mean)
    dy = None
    if dx is not None:
        backward = units.backward(linear, False, (True, True, True, False))
        dy, sum_xhat, sum_x, _ = backward(x, scale, None, *statistics, None, dx, None, None)
        n = max(x.size // max(x.shape[spec.feature_axis], 1), 1)
        dmean, dvar = spec.over((sum_x / n, 2 * sum_xhat / (n * rstd)))
    dy = _add_affine(linear, x, dscale, dbias, statistics, dy)
    if dresidual is not None:
        dy = dresidual if dy is None else (dy.astype(dtype) + dresidual.astype(dtype)).astype(x.dtype)
    if spec.relu:
        y = None if residual is None else y  # as the backward pass tells where relu passed its argument on
        passed = _batch_norm_xla.passed(x, scale, bias, statistics, y, feature_axis=spec.feature_axis)
        dy = jnp.where(passed, dy, 0)
    return dy, dmean.astype(spec.statistics_dtype), dvar.astype(spec.statistics_dtype)


def _inference(spec, primals, tangents):
    """With the statistics given: mean' is in the bias, and var' in the scale, by rstd' = -rstd^3 var' / 2."""
    x, scale, _, mean, var = primals
    dx, dscale, dbias, dmean, dvar = tangents
    dtype = compute_dtype(x)
    scale, mean, var = (a.astype(dtype) for a in (scale, mean, var))
    rstd = lax.rsqrt(var + spec.epsilon)
    spec = _linear(spec)
    dy = None
    if dx is not None:
        backward = units.backward(spec, True, (True, False, False, False))
        dy = backward(x, scale, None, mean, None, rstd, None, dx, None, None)[0]
    if dvar is not None:
        through = -scale * rstd * rstd * dvar.astype(dtype) / 2
        dscale = through if dscale is None else dscale.astype(dtype) + through
    if dmean is not None:
        through = -scale * rstd * dmean.astype(dtype)
        dbias = through if dbias is None else dbias.astype(dtype) + through
    return _add_affine(spec, x, dscale, dbias, Statistics(mean, None, rstd), dy)


def _linear(spec: Spec) -> Spec:
    """The same without what is not linear in the tangents, and on no GPU's kernels."""
    forward, backward = (Route(tuple(k for k in r.kernels if k != "cudnn")) for r in (spec.forward, spec.backward))
    return dataclasses.replace(spec, relu=False, forward=forward, backward=backward)


def _add_affine(spec, x, dscale, dbias, statistics, dy):
    """dy + dscale xhat + dbias, None where all three are."""
    if dscale is None and dbias is None:
        return dy
    zero = jnp.zeros_like(statistics.mean)
    dscale, dbias = (zero if d is None else d.astype(zero.dtype) for d in (dscale, dbias))
    return units.normalise(spec)(x, dscale, dbias, *statistics, dy)[0]


def _training_formula(spec, x, scale, bias, residual):
    settings = {"feature_axis": spec.feature_axis, "epsilon": spec.epsilon, "over": spec.over}
    y, mean, var = _batch_norm_xla.plain(x, scale, bias, None, **settings)
    y = y if residual is None else y + residual.astype(y.dtype)
    y = jax.nn.relu(y) if spec.relu else y
    return y.astype(x.dtype), mean.astype(spec.statistics_dtype), var.astype(spec.statistics_dtype)


def _inference_formula(spec, x, scale, bias, mean, var):
    settings = {"feature_axis": spec.feature_axis, "epsilon": spec.epsilon}
    return _batch_norm_xla.plain(x, scale, bias, (mean, var), **settings)[0].astype(x.dtype)


TRAINING, INFERENCE = Rules(_training, _training_formula), Rules(_inference, _inference_formula)
