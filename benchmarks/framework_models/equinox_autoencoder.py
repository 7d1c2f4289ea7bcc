"""A convolutional autoencoder in equinox: layers for one image, under `jax.vmap`."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

from benchmarks.framework_models import Training, sgd


class Autoencoder(eqx.Module):
    """Each layer of the encoder halves the image, each layer of the decoder doubles it."""

    stem: eqx.nn.Conv2d
    encoder: list[eqx.nn.Conv2d]
    decoder: list[eqx.nn.ConvTranspose2d]
    head: eqx.nn.Conv2d

    def __init__(self, inputs: int, features: Sequence[int], dtype: Any, key: jax.Array):
        keys = iter(jax.random.split(key, 2 * len(features)))
        pairs = list(itertools.pairwise(features))
        halving = {"kernel_size": 4, "stride": 2, "padding": 1, "dtype": dtype}
        same = {"kernel_size": 3, "padding": 1, "dtype": dtype}
        self.stem = eqx.nn.Conv2d(inputs, features[0], **same, key=next(keys))
        self.encoder = [eqx.nn.Conv2d(a, b, **halving, key=next(keys)) for a, b in pairs]
        self.decoder = [eqx.nn.ConvTranspose2d(b, a, **halving, key=next(keys)) for a, b in reversed(pairs)]
        self.head = eqx.nn.Conv2d(features[0], inputs, **same, key=next(keys))

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer in (self.stem, *self.encoder, *self.decoder):
            x = jax.nn.relu(layer(x))
        return self.head(x)


def training(x: jax.ShapeDtypeStruct, features: Sequence[int]) -> Training:
    model = Autoencoder(x.shape[1], features, x.dtype, jax.random.key(0))
    params, static = eqx.partition(model, eqx.is_inexact_array)
    optimizer = sgd()

    def step(state: tuple[Any, Any], x: jax.Array, target: jax.Array) -> tuple[tuple[Any, Any], jax.Array]:
        params, optimizer_state = state

        def loss_fn(model: Autoencoder) -> jax.Array:
            return jnp.square(jax.vmap(model)(x).astype(jnp.float32) - target).mean()

        loss, gradients = eqx.filter_value_and_grad(loss_fn)(eqx.combine(params, static))
        updates, optimizer_state = optimizer.update(gradients, optimizer_state, params)
        return (optax.apply_updates(params, updates), optimizer_state), loss

    return Training((params, optimizer.init(params)), step)
