"""U-Net (Ronneberger et al., 2015; 3D: Cicek et al., 2016) in flax.linen, with transposed convolutions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.training.train_state import TrainState

from benchmarks.framework_models import Training, sgd


class DoubleConv(nn.Module):
    features: int
    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for _ in range(2):
            x = nn.relu(nn.Conv(self.features, (3,) * (x.ndim - 2), dtype=self.dtype)(x))
        return x


class UNet(nn.Module):
    features: Sequence[int]  # of the levels; each has half the size of the level above it
    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        twos, skips = (2,) * (x.ndim - 2), []
        *above, bottom = self.features
        for count in above:
            x = DoubleConv(count, self.dtype)(x)
            skips.append(x)
            x = nn.max_pool(x, twos, twos)
        x = DoubleConv(bottom, self.dtype)(x)
        for count in reversed(above):
            x = nn.ConvTranspose(count, twos, twos, dtype=self.dtype)(x)
            x = DoubleConv(count, self.dtype)(jnp.concatenate([skips.pop(), x], axis=-1))
        return nn.Conv(1, (1,) * (x.ndim - 2), dtype=self.dtype)(x)


def training(x: jax.ShapeDtypeStruct, features: Sequence[int]) -> Training:
    model = UNet(features, x.dtype)
    params = jax.jit(model.init)(jax.random.key(0), jnp.zeros((1, *x.shape[1:]), x.dtype))
    state = TrainState.create(apply_fn=model.apply, params=params, tx=sgd())

    def step(state: TrainState, x: jax.Array, target: jax.Array) -> tuple[TrainState, jax.Array]:
        def loss_fn(params: Any) -> jax.Array:
            return jnp.square(state.apply_fn(params, x).astype(jnp.float32) - target).mean()

        loss, gradients = jax.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads=gradients), loss

    return Training(jax.tree.map(jnp.asarray, state), step)
