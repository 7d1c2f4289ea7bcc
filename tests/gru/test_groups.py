"""Derivatives and transformations of groups: `vmap` over the weights of the GRU."""

from __future__ import annotations

from functools import partial

import gru_references
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from backends import CPU_KERNEL, GRU
from gru_cases import Case, make_inputs
from jax import checkpoint_policies

import jaxgrad

BACKENDS = GRU

CASE = Case(T=4, B=2, I=3, H=4, direction="bidirectional", linear_before_reset=True)
WEIGHTS = ("w", "r", "b")
GROUPS = 3


def _weights(dtype):
    """Weights of each group, and the other arrays, which the groups share."""
    drawn = [make_inputs(CASE.replace(seed=seed), dtype)[0] for seed in range(GROUPS)]
    return {name: np.stack([getattr(one, name) for one in drawn]) for name in WEIGHTS}, drawn[0]


def _loss(gru, inputs, weights):
    y, y_h = gru(*inputs._replace(**weights), **CASE.settings)
    return jnp.sum(jnp.sin(y)) + jnp.sum(y_h**2)


def _compare(backend, transformed, **settings):
    """Compares `transformed(loss)` under `vmap` with the reference for each group."""
    stacked, inputs = _weights(backend.widest)
    gru = partial(backend.gru, **settings)
    found = jax.jit(jax.vmap(transformed(partial(_loss, gru, backend.put(inputs)))))(backend.put(stacked))
    wide = jax.tree.map(lambda a: a.astype(np.float64) if a.dtype == np.float32 else a, (stacked, inputs))
    reference = jax.jit(transformed(partial(_loss, gru_references.forward, wide[1])))
    for i in range(GROUPS):
        expected = reference(jax.tree.map(lambda a, i=i: a[i], wide[0]))
        jax.tree.map(
            lambda a, b, i=i: np.testing.assert_allclose(a[i], b, rtol=0, atol=backend.atol(1e-11)), found, expected
        )


@pytest.mark.thorough_on_xla
def test_second_derivatives(backend):
    def of_penalty(loss):
        def penalty(weights):
            return sum(jnp.sum(g**2) for g in jax.tree.leaves(jax.grad(loss)(weights)))

        return jax.grad(penalty)

    _compare(backend, of_penalty)


@pytest.mark.thorough_on_xla
def test_forward_mode(backend):
    def tangent(loss):
        return lambda weights: jaxgrad.jvp(loss, (weights,), (jax.tree.map(jnp.cos, weights),))

    _compare(backend, tangent)


@pytest.mark.thorough_on_xla
def test_forward_over_reverse_mode(backend):
    def product(loss):
        return lambda weights: jaxgrad.jvp(jax.grad(loss), (weights,), (jax.tree.map(jnp.cos, weights),))[1]

    _compare(backend, product)


@pytest.mark.thorough_on_xla
def test_remat_every(backend):
    _compare(backend, jax.grad, remat_every=3)


@pytest.mark.parametrize("saves", [False, True])
def test_checkpoint_with_the_name_of_the_residuals(saves):
    names = ["jaxgrad.gru"] if saves else []
    policy = checkpoint_policies.save_only_these_names(*names)
    stacked, inputs = _weights("float32")

    def gradients(loss):
        return jax.vmap(jax.value_and_grad(loss))

    loss = partial(_loss, CPU_KERNEL.gru, inputs)
    lowered = jax.jit(gradients(jax.checkpoint(loss, policy=policy))).lower(stacked)
    compiled = lowered.compile(compiler_options={"xla_disable_hlo_passes": "cse"})  # it would merge the two calls
    text = compiled.as_text()
    assert text.count('custom_call_target="jaxgrad_cpu_gru_forward"') == (1 if saves else 2)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-5),
        compiled(stacked),
        jax.jit(gradients(loss))(stacked),
    )
