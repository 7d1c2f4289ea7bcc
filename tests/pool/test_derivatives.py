"""Derivatives of max pooling to any order, in both modes, against `jax.lax.reduce_window` in float64."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from backends import CPU_KERNEL, CUDA, XLA, XLA_ON_GPU
from op_cases import loss
from pool_cases import PoolCase, make_inputs, numpy_reference, value_and_gradient

import jaxgrad

pytestmark = pytest.mark.jax_version

BACKENDS = (CPU_KERNEL, XLA, XLA_ON_GPU, CUDA)

CASE = PoolCase(channels=5)
CASES = [CASE, CASE.replace(channels_last=False)]


def _third_order(function):
    """Derivatives of the squared norm of a gradient, twice."""

    def penalty(x):
        return jnp.sum(jax.grad(lambda x: loss(function(x)))(x) ** 2)

    def of_penalty(x):
        return jnp.sum(jnp.sin(jax.grad(penalty)(x)))

    return lambda x: (penalty(x), jax.grad(penalty)(x), jax.grad(of_penalty)(x))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradients_of_gradients(backend, case):
    x, _ = make_inputs(case, "float64", special=False)
    found = jax.jit(_third_order(case.op(implementation=backend.implementation)))(backend.put(x))
    expected = jax.jit(_third_order(case.lax))(CPU_KERNEL.put(x))
    for actual, desired in zip(found, expected, strict=True):
        np.testing.assert_allclose(actual, desired, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_both_modes(backend, case):
    x, _ = make_inputs(case, "float64", special=False)
    x, direction = backend.put((x, np.cos(np.arange(x.size)).reshape(x.shape)))

    def every(function):
        gradient = jax.grad(lambda x: loss(function(x)))
        slope = lambda x: jnp.sum(jnp.sin(jax.jvp(function, (x,), (direction,))[1]))  # noqa: E731
        return lambda x: (
            jax.jvp(function, (x,), (direction,)),
            jax.jvp(gradient, (x,), (direction,)),
            jax.grad(slope)(x),
            jax.jvp(slope, (x,), (direction,)),
        )

    with jaxgrad.forward_mode():
        found = jax.jit(every(case.op(implementation=backend.implementation)))(x)
    x, direction = CPU_KERNEL.put((np.asarray(x), np.asarray(direction)))  # JAX's tangents on a GPU are not exact
    expected = jax.jit(every(case.lax))(x)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-12), found, expected)


def test_dilated_windows_twice(backend):
    """The gradient is linear in dy: its derivative along dy is the gradient of that direction."""
    case = CASE.replace(dilation=(2, 3), padding=((2, 3), (1, 3)))
    x, dy = make_inputs(case, "float64", special=False)
    op = case.op(implementation=backend.implementation)
    _, expected = numpy_reference(case, x, dy)

    def along(dy):
        return jnp.vdot(value_and_gradient(op, x, dy)[1], expected)

    found = jax.jit(jax.grad(along))(backend.put(dy))
    with jaxgrad.forward_mode():
        tangent = jax.jit(lambda x, t: jax.jvp(op, (x,), (t,))[1])(backend.put(x), expected)
    np.testing.assert_allclose(found, tangent, rtol=1e-12)
    np.testing.assert_allclose(np.vdot(found, dy), np.vdot(expected, expected), rtol=1e-12)


def test_nothing_is_kept_but_x():
    """The gradient needs neither y nor the places of the maxima."""
    x = jnp.ones((2, 8, 8, 4))
    _, pullback = jax.vjp(lambda x: jaxgrad.max_pool(x, (2, 2), (2, 2), implementation="cpu"), x)
    assert [leaf.shape for leaf in jax.tree.leaves(pullback) if hasattr(leaf, "shape")] == [x.shape]
