"""Derivatives of pooling: the `jax.custom_vjp` functions around the passes, and forward mode.

The element that a window selects is the same around almost every x. So the input gradient and the tangent of a maximum
have no derivative by x; they are linear in their second operand, and each is the transpose of the other. The sum of a
window is linear in x.
"""

from __future__ import annotations

from functools import partial

import jax
from jax.ad_checkpoint import checkpoint_name

from jaxgrad._src.pool import passes
from jaxgrad._src.run.derivative_maps import JvpRules

# Of the results, for policies of `jax.checkpoint`.
_MAX_NAME, _AVG_NAME = "jaxgrad.max_pool", "jaxgrad.avg_pool"


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def max_pool(params, x):
    return passes.run(params, "forward", x)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _input_gradient(params, x, dy):
    return passes.run(params, "input_gradient", x, dy)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _tangent(params, x, dx):
    return passes.run(params, "tangent", x, dx)


def _max_pool_fwd(params, x):
    return checkpoint_name(max_pool(params, x), _MAX_NAME), x


def _max_pool_bwd(params, x, dy):
    return (_input_gradient(params, x, dy),)


def _input_gradient_fwd(params, x, dy):
    return _input_gradient(params, x, dy), x


def _input_gradient_bwd(params, x, cotangent):
    return None, _tangent(params, x, cotangent)


def _tangent_fwd(params, x, dx):
    return _tangent(params, x, dx), x


def _tangent_bwd(params, x, cotangent):
    return None, _input_gradient(params, x, cotangent)


max_pool.defvjp(_max_pool_fwd, _max_pool_bwd)
_input_gradient.defvjp(_input_gradient_fwd, _input_gradient_bwd)
_tangent.defvjp(_tangent_fwd, _tangent_bwd)


def _max_rule(params, primals, tangents):
    return _tangent(params, *primals, *tangents)


MAX_RULES = JvpRules(_max_rule)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def sum_pool(params, x):
    return passes.run(params, "forward", x)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _sum_input_gradient(params, dy):
    return passes.run(params, "input_gradient", dy)


def _sum_pool_fwd(params, x):
    return checkpoint_name(sum_pool(params, x), _AVG_NAME), None


def _sum_pool_bwd(params, _, dy):
    return (_sum_input_gradient(params, dy),)


def _sum_input_gradient_fwd(params, dy):
    return _sum_input_gradient(params, dy), None


def _sum_input_gradient_bwd(params, _, cotangent):
    return (sum_pool(params, cotangent),)


sum_pool.defvjp(_sum_pool_fwd, _sum_pool_bwd)
_sum_input_gradient.defvjp(_sum_input_gradient_fwd, _sum_input_gradient_bwd)


def _sum_rule(params, primals, tangents):
    return sum_pool(params, *tangents)


SUM_RULES = JvpRules(_sum_rule)
