"""Gradients that are not requested are not computed, and the others do not change."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from backends import BATCH_NORM
from batch_norm_references import (
    Case,
    inference,
    make_inputs,
    training,
    values_and_gradients,
)

import jaxgrad

BACKENDS = BATCH_NORM


@pytest.mark.parametrize("bits", [0b0001, 0b0010, 0b0100, 0b1000, 0b0110, 0b1101])
@pytest.mark.parametrize("activation", [None, "relu"])
def test_every_gradient_subset_matches_all_gradients(backend, bits, activation):
    """Requested gradients match those of a full differentiation; the others are not computed."""
    requested = [i for i in range(4) if bits & 1 << i]
    case = Case((4, 5, 33), 1, residual=True, activation=activation, dtypes=("float64",) * 3)
    inputs, cotangents = backend.put(make_inputs(case))

    def ours(x, scale, bias, residual):
        return training(backend)(x, scale, bias, residual=residual, **case.settings)

    _, everything = values_and_gradients(ours, inputs, cotangents)
    _, some = values_and_gradients(ours, inputs, cotangents, requested)
    for i in requested:
        np.testing.assert_allclose(some[i], everything[i], rtol=1e-12)
    assert [i for i, g in enumerate(some) if g is not None] == requested


@pytest.mark.parametrize("bits", [0b00001, 0b00010, 0b00100, 0b01000, 0b10000, 0b10101, 0b01010])
def test_every_gradient_subset_with_frozen_statistics(backend, bits):
    requested = [i for i in range(5) if bits & 1 << i]
    (x, scale, bias, _), cotangents = make_inputs(Case((4, 33, 5), dtypes=("float64",) * 3))
    inputs, dy = backend.put(((x, scale, bias, bias + 0.1, scale**2), (cotangents.y,)))
    _, everything = values_and_gradients(inference(backend), inputs, dy)
    _, some = values_and_gradients(inference(backend), inputs, dy, requested)
    for i in requested:
        np.testing.assert_allclose(some[i], everything[i], rtol=1e-12)


def test_only_requested_gradients_are_computed():
    x, c = jnp.ones((4, 5)), jnp.ones(5)

    def compiled(function):
        text = jax.jit(function).lower(x).compile().as_text()
        return [f'custom_call_target="jaxgrad_cpu_norm_{name}"' in text for name in ("forward", "backward")]

    def call(x):
        return jaxgrad.batch_norm_training(x, c, c, implementation="cpu")

    assert compiled(lambda x: call(x)[0]) == [True, False]
    assert compiled(lambda x: jax.vjp(lambda x: call(x)[0], x)[1](x)) == [True, True]
