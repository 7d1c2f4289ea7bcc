"""Higher derivatives of batch normalization against finite differences and against plain JAX."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from backends import BATCH_NORM
from batch_norm_references import (
    Case,
    in_float64,
    inference,
    make_inputs,
    plain_training,
    skip_without_kernels,
    training,
)
from jax.test_util import check_grads

BACKENDS = BATCH_NORM


def _call(backend, case):
    return lambda x, scale, bias, residual: training(backend)(x, scale, bias, residual=residual, **case.settings)


@pytest.mark.parametrize("axis", [-1, 1])
@pytest.mark.parametrize(("activation", "residual"), [(None, False), ("relu", False), ("relu", True), ("silu", True)])
def test_second_derivatives(backend, axis, activation, residual):
    case = Case((5, 3, 4), axis, residual, activation, dtypes=("float64",) * 3)
    if activation == "silu":
        skip_without_kernels(backend, activation)
    given = [a for a in make_inputs(case)[0] if a is not None]

    @jax.jit
    def call(*given):
        results = _call(backend, case)(*given, *[None] * (4 - len(given)))
        return jax.tree.map(lambda result: result + 1, results)  # the cotangents, which must not be 0 where relu is

    check_grads(call, backend.put(given), order=2, modes=["rev"], atol=1e-4, rtol=1e-4)


def test_second_derivatives_with_frozen_statistics(backend):
    x, scale, bias, _ = make_inputs(Case((5, 3, 4), dtypes=("float64",) * 3))[0]
    arrays = backend.put((x, scale, bias, bias + 0.2, scale**2 + 0.3))
    check_grads(jax.jit(inference(backend)), arrays, order=2, modes=["rev"], atol=1e-4, rtol=1e-4)


def _third_order(call, x):
    """A third derivative, with a different weight for each element."""

    def weigh(f):
        return lambda x: jnp.vdot(jnp.cos(jnp.arange(x.size)).reshape(x.shape), f(x))

    first = jax.grad(lambda x: jnp.sum(call(x).y ** 3) + jnp.sum(call(x).var ** 2))
    return jax.grad(weigh(jax.grad(weigh(first))))(x)


def test_third_derivatives(backend):
    case = Case((5, 4), dtypes=("float64",) * 3)
    x, scale, bias, _ = make_inputs(case)[0]
    found = _third_order(lambda x: training(backend)(x, scale, bias, **case.settings), backend.put(x))
    expected = _third_order(lambda x: plain_training(x, scale, bias, **case.settings), jnp.asarray(x))
    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-9)


def test_float64_reference_matches_finite_differences():
    """Verifies the reference itself."""
    inputs, _ = make_inputs(Case((5, 3, 4), residual=True, dtypes=("float64",) * 3))
    check_grads(partial(plain_training, feature_axis=-1), in_float64(tuple(inputs)), order=1, modes=["rev"])
