"""`jaxgrad.report` of training steps as flax, equinox and haiku write them."""

from __future__ import annotations

import inspect
from functools import partial

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState

import jaxgrad

pytestmark = pytest.mark.jax_version

hk = pytest.importorskip("haiku")

FEATURES = 32
IMAGES = jax.ShapeDtypeStruct((8, 16, 14, FEATURES), "float32")
PASSES = [("forward", "onednn"), ("weight_gradient", "onednn")]


def _nnx_step():
    model = nnx.Conv(FEATURES, 2 * FEATURES, (3, 3), rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)

    def step(model, optimizer, images):
        loss, gradients = nnx.value_and_grad(lambda model: jnp.mean(model(images) ** 2))(model)
        optimizer.update(model, gradients)
        return loss

    return step, (model, optimizer, jnp.zeros(IMAGES.shape, IMAGES.dtype))


def _equinox_step():
    conv = eqx.nn.Conv2d(FEATURES, 2 * FEATURES, 3, key=jax.random.key(0), dtype=jnp.float32)
    model = eqx.nn.Sequential([conv, eqx.nn.Lambda(jax.nn.relu)])  # arguments and results have a leaf that is no array

    def step(model, images):
        loss, gradients = eqx.filter_value_and_grad(lambda model: jnp.mean(jax.vmap(model)(images) ** 2))(model)
        return eqx.apply_updates(model, gradients), loss

    return step, (model, jnp.zeros((8, FEATURES, 16, 14), jnp.float32))


def _linen_step():
    model = nn.Conv(2 * FEATURES, (3, 3))
    params = model.init(jax.random.key(0), jnp.zeros((1, *IMAGES.shape[1:])))
    state = TrainState.create(apply_fn=model.apply, params=params, tx=optax.sgd(0.1))

    def step(state, images):
        loss, gradients = jax.value_and_grad(lambda p: jnp.mean(state.apply_fn(p, images) ** 2))(state.params)
        return state.apply_gradients(grads=gradients), loss

    return step, (state, IMAGES)


def _haiku_step():
    model = hk.without_apply_rng(hk.transform(lambda images: hk.Conv2D(2 * FEATURES, 3)(images)))
    params = jax.eval_shape(model.init, jax.random.key(0), IMAGES)
    return jax.value_and_grad(lambda params, images: jnp.mean(model.apply(params, images) ** 2)), (params, IMAGES)


CASES = {
    "nnx.jit": (_nnx_step, nnx.jit),
    "equinox.filter_jit": (_equinox_step, eqx.filter_jit),
    "linen": (_linen_step, jax.jit),
    "haiku": (_haiku_step, jax.jit),
}
if "graph" in inspect.signature(nnx.jit).parameters:
    CASES["nnx.jit without graphs"] = _nnx_step, partial(nnx.jit, graph=False)


def _passes(function, args):
    found = jaxgrad.report(function, *args, platform="cpu")
    assert all("test_report.py" in c.source for c in found.convolutions)
    return [(c.pass_name, c.implementation) for c in found.convolutions]


@pytest.mark.parametrize("name", CASES)
def test_report(name):
    """Acceleration inside and outside the framework's `jit`, and without it."""
    make, jit = CASES[name]
    step, args = make()
    assert _passes(jaxgrad.accelerate(jit(step)), args) == PASSES
    assert _passes(jit(jaxgrad.accelerate(step)), args) == PASSES
    assert _passes(jaxgrad.accelerate(step), args) == PASSES
    assert _passes(jit(step), args) == [("", "xla")] * 2
