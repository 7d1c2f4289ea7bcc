"""Profiles name the layer of each kernel call, forward and backward, beside the op and its pass."""

from __future__ import annotations

import re

import equinox as eqx
import flax.linen
import flax.nnx
import haiku as hk
import jax
import jax.numpy as jnp
import pytest

from jaxgrad import nn
from jaxgrad.nn import equinox, haiku, keras, linen, nnx

pytestmark = pytest.mark.jax_version

X = jnp.ones((4, 5, 3), "float32")
KEY = jax.random.key(0)


def _of_linen(module, **arguments):
    variables = module.init(KEY, X, **arguments)
    params = variables.pop("params")
    return lambda params, x: module.apply(
        {"params": params, **variables}, x, mutable=["batch_stats"], **arguments
    ), params


def _of_nnx(layer):
    graph, params, rest = flax.nnx.split(layer, flax.nnx.Param, ...)
    return lambda params, x: flax.nnx.merge(graph, params, rest, copy=True)(x), params


def _of_haiku(function):
    module = hk.transform_with_state(function)
    params, state = module.init(KEY, X)
    return lambda params, x: module.apply(params, state, None, x), params


def _of_keras(layer):
    layer.build(X.shape)
    rest = [variable.value for variable in layer.non_trainable_variables]
    return lambda params, x: layer.stateless_call(params, rest, x)[0], [v.value for v in layer.trainable_variables]


def _unroll(x):
    core = hk.GRU(6)
    return haiku.dynamic_unroll(core, x, core.initial_state(x.shape[1]))


def _norm_of_equinox():
    norm, state = eqx.nn.make_with_state(equinox.BatchNorm)(3, axis_name="batch", mode="batch")
    batched = jax.vmap(lambda norm, x: norm(x, state)[0], (None, 0), axis_name="batch")
    return lambda norm, x: batched(norm, jnp.swapaxes(x, 1, 2)), norm


LAYERS = {
    "jaxgrad.nn.GRU/layer_1": (
        lambda: (lambda layer, x: layer(x), nn.GRU(3, 6, 2, key=KEY)),
        "gru",
    ),
    "jaxgrad.nn.LayerNorm": (lambda: (lambda norm, x: norm(x), nn.LayerNorm(3)), "layer_norm"),
    "RNN": (lambda: _of_linen(linen.RNN(flax.linen.GRUCell(6))), "gru"),
    "jaxgrad.nn.nnx.RNN": (lambda: _of_nnx(nnx.RNN(flax.nnx.GRUCell(3, 6, rngs=flax.nnx.Rngs(0)))), "gru"),
    "jaxgrad.nn.equinox.scan_gru": (
        lambda: (lambda cell, x: equinox.scan_gru(cell, jnp.zeros((5, 6)), x), eqx.nn.GRUCell(3, 6, key=KEY)),
        "gru",
    ),
    "gru": (lambda: _of_haiku(_unroll), "gru"),
    "jaxgrad.nn.keras.GRU": (lambda: _of_keras(keras.GRU(6)), "gru"),
    "BatchNorm": (lambda: _of_linen(linen.BatchNorm(), use_running_average=False), "batch_norm"),
    "jaxgrad.nn.nnx.BatchNorm": (lambda: _of_nnx(nnx.BatchNorm(3, rngs=flax.nnx.Rngs(0))), "batch_norm"),
    "jaxgrad.nn.equinox.BatchNorm": (_norm_of_equinox, "batch_norm"),
    "batch_norm": (lambda: _of_haiku(lambda x: haiku.BatchNorm(True, True, 0.9)(x, True)), "batch_norm"),
    "InstanceNorm": (lambda: _of_linen(linen.InstanceNorm()), "group_norm"),
    "jaxgrad.nn.nnx.RMSNorm": (lambda: _of_nnx(nnx.RMSNorm(3, rngs=flax.nnx.Rngs(0))), "rms_norm"),
    "jaxgrad.nn.equinox.LayerNorm": (
        lambda: (lambda norm, x: jax.vmap(norm)(x), equinox.LayerNorm((5, 3))),
        "layer_norm",
    ),
    "layer_norm": (lambda: _of_haiku(lambda x: haiku.LayerNorm(-1, True, True)(x)), "layer_norm"),
    "jaxgrad.nn.keras.GroupNormalization": (lambda: _of_keras(keras.GroupNormalization(3)), "group_norm"),
}


@pytest.mark.parametrize("name", LAYERS)
def test_layer(name):
    make, op = LAYERS[name]
    call, params = make()
    arrays, static = eqx.partition(params, eqx.is_inexact_array)

    def loss(arrays):
        found = call(eqx.combine(arrays, static), X)
        return sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(eqx.filter(found, eqx.is_inexact_array)))

    text = jax.jit(jax.grad(loss)).lower(arrays).compile().as_text()
    found = set(re.findall(rf'op_name="([^"]*)jaxgrad\.{op}_(forward|backward)\.', text))
    for pass_name, start in (("forward", "jvp("), ("backward", "transpose(jvp(")):
        scopes = [scope.replace(")", "") for scope, own in found if own == pass_name and start in scope]
        assert any(re.search(rf"\b{re.escape(name)}\b", scope) for scope in scopes), found
