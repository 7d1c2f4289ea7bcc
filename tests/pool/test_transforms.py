"""Pooling under JAX's transformations, compared with plain JAX in float64."""

from __future__ import annotations

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import transformations
from backends import CPU_KERNEL, CUDA, Backend, float64_on_cpu
from op_cases import values_and_gradients
from pool_cases import PoolCase, make_inputs
from tolerances import assert_close, input_dtype

import jaxgrad

pytestmark = pytest.mark.jax_version

BACKENDS = (CPU_KERNEL, Backend(None, "gpu"), CUDA)

CASE = PoolCase()
NAMES = ("vjp", "jacrev", "scan", "while_loop", "cond", "gradients_of_a_gradient_penalty")


OPS = {
    "max_pool": (CASE.op(), CASE.lax),
    "avg_pool": (partial(jaxgrad.avg_pool, **CASE.op().keywords), partial(CASE.lax_mean, count_include_pad=True)),
}
every_op = pytest.mark.parametrize("op", OPS)


def _scaled(pool):
    return lambda x, scale: pool(x * scale)


def _op(name: str, backend: Backend):
    return partial(OPS[name][0], implementation=backend.implementation)


def _arrays(dtype: str = "float32"):
    x, _ = make_inputs(CASE, "float32", special=False)
    return tuple(np.asarray(a, input_dtype(dtype)) for a in (x, np.linspace(0.5, 2, CASE.channels, dtype=np.float32)))


@cache
def _expected(op: str, name: str):
    with float64_on_cpu():
        return jax.jit(partial(getattr(transformations, name), _scaled(OPS[op][1])))(_arrays("float64"))


@every_op
@pytest.mark.parametrize("name", NAMES)
def test_matches_plain_jax(backend, op, name):
    function = _scaled(_op(op, backend))
    found = jax.jit(partial(getattr(transformations, name), function))(backend.put(_arrays()))
    jax.tree.map(lambda a, b: assert_close(a, b, dtype="float32", terms=100), found, _expected(op, name))


@every_op
def test_donated_arguments(backend, op):
    gradients = partial(values_and_gradients, _scaled(_op(op, backend)))
    donated = backend.put(tuple(map(np.array, _arrays())))
    expected = jax.jit(gradients)(*backend.put(_arrays()))
    found = jax.jit(gradients, donate_argnums=(0, 1))(*donated)
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    assert donated[0].is_deleted()


@every_op
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_eval_shape_and_weak_types(op, dtype):
    x = jnp.ones(CASE.shape, dtype)
    for pool in OPS[op]:
        found = jax.eval_shape(partial(values_and_gradients, pool), x)[0][1]
        assert (found.shape, found.dtype, found.weak_type) == (CASE.y_shape, jnp.dtype(dtype), False)


@every_op
def test_strict_settings(backend, op):
    """With strict dtype promotion, and no intermediate NaN."""
    with jax.debug_nans(True), jax.numpy_dtype_promotion("strict"):
        found = jax.jit(jax.grad(lambda x: jnp.sum(_op(op, backend)(x))))(backend.put(_arrays()[0]))
    assert np.isfinite(found).all()
