"""Training a small network over several devices gives the losses of a single device."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from mesh_running import CONV_KERNEL, KERNEL, XLA_ON_GPU, collectives, mesh, on_devices, run_checks

import jaxgrad

pytestmark = pytest.mark.jax_version

NHWC = ("NHWC", "HWIO", "NHWC")
STEPS, RATE = 8, 0.4


def _parameters():
    keys = jax.random.split(jax.random.key(0), 6)
    shapes = (3, 3, 2, 8), (2, 2, 8, 4), (1, 30, 24), (1, 30, 10)  # two convolutions, then the GRU's w and r
    weights = [jax.random.normal(key, shape) / 4 for key, shape in zip(keys, shapes, strict=False)]
    return {"weights": weights, "scale": jnp.ones(8), "bias": jnp.zeros(8)}


def _loss(parameters, x, target, **names):
    """A convolution with batch normalization, a transposed convolution, and a GRU over the rows of its result."""
    conv, transposed, w, r = parameters["weights"]
    y = jaxgrad.conv_general_dilated(x, conv, (2, 2), "SAME", dimension_numbers=NHWC, implementation=CONV_KERNEL)
    y, mean, var = jaxgrad.batch_norm_training(
        y, parameters["scale"], parameters["bias"], activation="relu", implementation=KERNEL, **names
    )
    y = jaxgrad.conv_transpose(y, transposed, (2, 2), "SAME", dimension_numbers=NHWC, implementation=CONV_KERNEL)
    rows = jnp.moveaxis(y, 1, 0).reshape(y.shape[1], y.shape[0], -1)
    _, y_h = jaxgrad.gru(rows, w, r, implementation=XLA_ON_GPU)
    return jnp.mean((y_h[0] - target) ** 2), (mean, var)


def _train(step, x, target):
    parameters, losses = _parameters(), []
    for _ in range(STEPS):
        parameters, loss = step(parameters, x, target)
        losses.append(float(loss))
    return losses


def _update(parameters, gradients):
    return jax.tree.map(lambda p, g: p - RATE * g, parameters, gradients)


def _step(parameters, x, target):
    (loss, _), gradients = jax.value_and_grad(_loss, has_aux=True)(parameters, x, target)
    return _update(parameters, gradients), loss


def _own_step(parameters, x, target):
    """The training step of one device, inside `shard_map`."""

    def loss(parameters):
        found, _ = _loss(parameters, x, target, axis_name="d")
        return jax.lax.pmean(found, "d")

    loss, gradients = jax.value_and_grad(loss)(parameters)
    return _update(parameters, gradients), loss


def check_losses():
    d = mesh()
    x = jax.random.normal(jax.random.key(1), (16, 6, 6, 2)) + jnp.arange(16.0)[:, None, None, None] / 4
    target = jax.random.normal(jax.random.key(2), (16, 10)) / 2
    expected = _train(jax.jit(_step), x, target)
    assert expected[-1] < 0.9 * expected[0], expected
    spread = jax.device_put((x, target), NamedSharding(d, P("d")))
    shared = jax.device_put(_parameters(), NamedSharding(d, P()))
    step = jax.jit(_step)
    np.testing.assert_allclose(_train(step, *spread), expected, rtol=1e-5)
    found = collectives(step.lower(shared, *spread).compile().as_text())
    assert set(found) == {"all-reduce"}, found
    own = jax.shard_map(_own_step, mesh=d, in_specs=(P(), P("d"), P("d")), out_specs=(P(), P()))
    np.testing.assert_allclose(_train(jax.jit(own), *spread), expected, rtol=1e-5)


@on_devices([check_losses])
def test_losses_over_a_mesh(run_python, platform, checks):
    run_checks(run_python, platform, __file__, checks)
