"""`vmap` over every subset of the arguments, against a Python loop."""

from __future__ import annotations

import itertools
from functools import partial

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
)

import jaxgrad

BACKENDS = BATCH_NORM
N = 3  # independent problems
NAMES = ("x", "scale", "bias", "residual")


def _call(backend, case):
    return lambda x, scale, bias, residual: training(backend)(x, scale, bias, residual=residual, **case.settings)


def _values_and_gradients(call, *inputs):
    def loss(inputs):
        results = call(*inputs)
        weight = jnp.cos(jnp.arange(results.y.size)).reshape(results.y.shape)
        return jnp.vdot(weight, results.y) + jnp.sum(results.mean**2) + jnp.sum(results.var**2), results

    return jax.value_and_grad(loss, has_aux=True)(inputs)


@pytest.mark.parametrize("names", [n for k in range(1, 5) for n in itertools.combinations(NAMES, k)], ids="-".join)
@pytest.mark.parametrize(
    ("shape", "axis"), [((4, 5, 3), -1), pytest.param((3, 4, 6), 0, marks=pytest.mark.thorough)], ids=str
)
def test_every_subset_of_mapped_arguments(backend, names, shape, axis):
    case = Case(shape, axis, residual=True, activation="relu", dtypes=("float64",) * 3)
    drawn = [make_inputs(case.replace(seed=seed))[0] for seed in range(N)]
    inputs = backend.put(
        tuple(np.stack([getattr(d, n) for d in drawn]) if n in names else getattr(drawn[0], n) for n in NAMES)
    )
    in_axes = tuple(0 if name in names else None for name in NAMES)
    run = partial(_values_and_gradients, _call(backend, case))
    found = jax.jit(jax.vmap(run, in_axes=in_axes))(*inputs)
    alone = jax.jit(run)
    each = [alone(*(a if axis is None else a[i] for a, axis in zip(inputs, in_axes, strict=True))) for i in range(N)]
    jax.tree.map(lambda a, *b: np.testing.assert_allclose(a, np.stack(b), rtol=1e-10, atol=1e-10), found, *each)


@pytest.mark.parametrize("in_axes", [(0, None, None, None, None), (2, 0, None, None, 1), (None, None, 0, 0, None)])
def test_vmap_with_frozen_statistics(backend, in_axes):
    x, scale, bias, _ = make_inputs(Case((4, 5, 3), dtypes=("float64",) * 3))[0]
    single = (x, scale, bias, bias + 0.2, scale**2 + 0.3)
    inputs = backend.put(
        tuple(a if axis is None else np.stack([a, 2 * a, a + 1], axis) for a, axis in zip(single, in_axes, strict=True))
    )

    def run(*inputs):
        return jax.grad(lambda inputs: jnp.sum(jnp.sin(inference(backend)(*inputs))))(inputs)

    found = jax.jit(jax.vmap(run, in_axes=in_axes))(*inputs)
    for i in range(N):
        one = [a if axis is None else jnp.take(a, i, axis) for a, axis in zip(inputs, in_axes, strict=True)]
        for a, b in zip(found, run(*one), strict=True):
            np.testing.assert_allclose(a[i], b, rtol=1e-10, atol=1e-10)


def test_nested_vmap(backend):
    x = backend.put(np.random.default_rng(0).standard_normal((2, 3, 4, 5)))
    scale, bias = backend.put((np.linspace(1, 2, 10).reshape(2, 5), np.linspace(-1, 1, 5)))
    call = lambda x, scale: training(backend)(x, scale, bias)  # noqa: E731
    found = jax.vmap(jax.vmap(call, in_axes=(0, None)), in_axes=(0, 0))(x, scale)
    for i, j in itertools.product(range(2), range(3)):
        jax.tree.map(
            lambda a, b, i=i, j=j: np.testing.assert_allclose(a[i, j], b, rtol=1e-12), found, call(x[i, j], scale[i])
        )


def test_vmap_is_one_kernel_call():
    """The mapped axis is the axis of calls, without a loop."""
    x, c = jnp.ones((7, 4, 5)), jnp.ones(5)
    call = jax.vmap(lambda x: jaxgrad.batch_norm_training(x, c, c, implementation="cpu")[0])
    text = jax.jit(call).lower(x).as_text()
    assert text.count("stablehlo.custom_call @jaxgrad_cpu_norm_forward") == 1
    assert "while" not in text
