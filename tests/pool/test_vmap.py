"""`vmap` of max pooling, its gradient and its tangent, against a Python loop."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from backends import CPU_KERNEL, CUDA, XLA, XLA_ON_GPU
from pool_cases import PoolCase, assert_same_bits, make_inputs, value_and_gradient

import jaxgrad

pytestmark = pytest.mark.jax_version

BACKENDS = (CPU_KERNEL, XLA, XLA_ON_GPU, CUDA)
CASES = [PoolCase(), PoolCase(channels_last=False), PoolCase(batch=())]


@pytest.mark.parametrize("axes", [(0, 0), (None, 0), (0, None), (2, 1)])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_subset_of_mapped_operands(backend, case, axes):
    drawn = [make_inputs(case.replace(seed=seed), "float32") for seed in range(3)]
    drawn = [(x, np.round(4 * dy)) for x, dy in drawn]  # XLA adds on a GPU in any order
    arrays = [
        drawn[0][i] if axis is None else np.stack([each[i] for each in drawn], axis) for i, axis in enumerate(axes)
    ]
    op = case.op(implementation=backend.implementation)
    found = jax.jit(jax.vmap(lambda x, dy: value_and_gradient(op, x, dy), axes))(*backend.put(arrays))
    for i in range(3):
        one = [array if axis is None else np.take(array, i, axis) for array, axis in zip(arrays, axes, strict=True)]
        for actual, desired in zip(found, value_and_gradient(op, *backend.put(one)), strict=True):
            assert_same_bits(actual[i], desired)


def test_nested_vmap(backend):
    case = PoolCase(batch=())
    xs = np.stack([make_inputs(case.replace(seed=seed), "float32")[0] for seed in range(6)]).reshape(3, 2, *case.shape)
    op = case.op(implementation=backend.implementation)
    found = jax.jit(jax.vmap(jax.vmap(op, 1, 1), 0, 0))(backend.put(np.moveaxis(xs, 1, 2)))
    for j, i in np.ndindex(3, 2):
        assert_same_bits(np.asarray(found)[j, :, i], op(xs[j, i]))


def test_nested_vmap_of_avg_pool(backend):
    x = np.random.default_rng(0).normal(size=(3, 4, 2, 9, 5)).astype(np.float32)
    op = partial(jaxgrad.avg_pool, window_shape=(3,), strides=(2,), implementation=backend.implementation)
    found = jax.jit(jax.vmap(jax.vmap(op, 1, 1), 0, 0))(backend.put(x))
    for j, i in np.ndindex(3, 2):
        np.testing.assert_allclose(found[j, :, i], op(x[j, :, i]), rtol=1e-6)


def test_vmap_of_a_tangent(backend):
    case = PoolCase()
    x, _ = make_inputs(case, "float32")
    directions = np.random.default_rng(0).normal(size=(3, *x.shape)).astype(np.float32)
    op = case.op(implementation=backend.implementation)
    with jaxgrad.forward_mode():
        found = jax.jit(jax.vmap(lambda t: jax.jvp(op, (x,), (t,))[1]))(backend.put(directions))
        for i in range(3):
            assert_same_bits(found[i], jax.jvp(op, (x,), (directions[i],))[1])


def test_vmap_is_one_kernel_call():
    x = jnp.ones((7, 4, 6, 6, 5))
    call = jax.vmap(lambda x: jaxgrad.max_pool(x, (2, 2), implementation="cpu"))
    text = jax.jit(call).lower(x).as_text()
    assert text.count("stablehlo.custom_call @jaxgrad_cpu_max_pool") == 1
    assert "while" not in text


def test_vmap_over_no_problem(backend):
    op = PoolCase().op(implementation=backend.implementation)
    assert jax.vmap(op)(jnp.ones((0, 2, 7, 5, 3))).shape == (0, 2, 3, 5, 3)
