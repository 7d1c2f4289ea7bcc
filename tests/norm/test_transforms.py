"""Batch normalization under `checkpoint`, `scan` and donation, and with symbolic shapes."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from backends import BATCH_NORM
from batch_norm_references import (
    Case,
    make_inputs,
    plain_training,
    training,
)
from jax import lax

import jaxgrad

pytestmark = pytest.mark.jax_version

BACKENDS = BATCH_NORM


def test_checkpoint_scan_and_donation(backend):
    case = Case((6, 5), activation="relu", dtypes=("float64",) * 3)
    x, scale, bias, _ = backend.put(make_inputs(case)[0])

    def layers(call, x):
        def step(x, _):
            results = jax.checkpoint(lambda x: call(x, scale, bias, **case.settings))(x)
            return x + results.y, results.var

        x, variances = lax.scan(step, x, None, length=3)
        return jnp.sum(x**2) + jnp.sum(variances)

    ours = jax.jit(jax.value_and_grad(partial(layers, training(backend))), donate_argnums=0)
    expected = jax.value_and_grad(partial(layers, plain_training))(x)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-9), ours(x.copy()), expected)


@pytest.mark.parametrize(("shape", "axis"), [(("b", "h", 8, 5), -1), (("b", 5, "h"), 1), ((4, "b"), -1)], ids=str)
def test_symbolic_shapes(shape, axis):
    """A shape-polymorphic export runs on XLA."""
    x_shape = jax.export.symbolic_shape(", ".join(map(str, shape)))
    x = jax.ShapeDtypeStruct(x_shape, np.float64)
    channels = jax.ShapeDtypeStruct((x_shape[axis],), np.float64)

    def gradients(x, scale, residual):
        def loss(x, scale):
            settings = {"feature_axis": axis, "activation": "relu", "residual": residual}
            y, mean, var = jaxgrad.batch_norm_training(x, scale, scale, **settings)
            return jnp.sum(y**3) + jnp.sum(mean**2) + jnp.sum(var**2)

        return jax.grad(loss, (0, 1))(x, scale)

    exported = jax.export.export(jax.jit(gradients), platforms=["cpu"])(x, channels, x)
    (x, scale, _, residual), _ = make_inputs(
        Case(tuple(n if isinstance(n, int) else 6 for n in shape), axis, True, dtypes=("float64",) * 3)
    )
    with jax.default_device(jax.devices("cpu")[0]):
        found, expected = exported.call(x, scale, residual), jax.jit(gradients)(x, scale, residual)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-9), found, expected)
