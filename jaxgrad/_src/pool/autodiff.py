"""Derivatives of max pooling: the `jax.custom_vjp` functions around the passes, and forward mode.

The selection is constant around almost every x. So the input gradient and the tangent have no derivative by x; they are
linear in their second operand, and each is the transpose of the other.
"""

from __future__ import annotations

from functools import partial

import jax
from jax.ad_checkpoint import checkpoint_name

from jaxgrad._src.pool import passes
from jaxgrad._src.run.derivative_maps import JvpRules

_CHECKPOINT_NAME = "jaxgrad.max_pool"  # of the result for policies of `jax.checkpoint`


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def max_pool(params, x):
    return passes.forward(params, x)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _input_gradient(params, x, dy):
    return passes.input_gradient(params, x, dy)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _tangent(params, x, dx):
    return passes.tangent(params, x, dx)


def _max_pool_fwd(params, x):
    return checkpoint_name(max_pool(params, x), _CHECKPOINT_NAME), x


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


def _rule(params, primals, tangents):
    return _tangent(params, *primals, *tangents)


RULES = JvpRules(_rule)
