"""ConvNeXt (Liu et al., "A ConvNet for the 2020s", 2022) in flax.nnx, without stochastic depth."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from benchmarks.framework_models import CLASSES, Training
from benchmarks.framework_models.nnx_training import classifier_training

# 1e-6 in the paper, where the first gradients of a branch hardly differ from zero.
_LAYER_SCALE = 0.1


class Block(nnx.Module):
    def __init__(self, features: int, **kw: Any):
        self.depthwise = nnx.Conv(features, features, (7, 7), feature_group_count=features, **kw)
        self.norm = nnx.LayerNorm(features, epsilon=1e-6, **kw)
        self.expand = nnx.Linear(features, 4 * features, **kw)
        self.reduce = nnx.Linear(4 * features, features, **kw)
        self.scale = nnx.Param(jnp.full((features,), _LAYER_SCALE))

    def __call__(self, x: jax.Array) -> jax.Array:
        y = self.norm(self.depthwise(x))
        y = self.reduce(nnx.gelu(self.expand(y)))
        return x + y * self.scale.astype(y.dtype)


class ConvNeXt(nnx.Module):
    """`features` and `depths`: the features and the number of blocks of each stage."""

    def __init__(self, inputs: int, features: Sequence[int], depths: Sequence[int], **kw: Any):
        self.layers = nnx.List([])
        for i, (count, depth) in enumerate(zip(features, depths, strict=True)):
            size = 2 if i else 4
            downsample = nnx.Conv(inputs, count, (size, size), size, padding="VALID", **kw)
            norm = nnx.LayerNorm(inputs if i else count, epsilon=1e-6, **kw)
            self.layers.extend([norm, downsample] if i else [downsample, norm])
            self.layers.extend(Block(count, **kw) for _ in range(depth))
            inputs = count
        self.norm = nnx.LayerNorm(inputs, epsilon=1e-6, **kw)
        self.head = nnx.Linear(inputs, CLASSES, **kw)

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x.mean((1, 2))))


def training(x: jax.ShapeDtypeStruct, features: Sequence[int], depths: Sequence[int]) -> Training:
    return classifier_training(ConvNeXt(x.shape[-1], features, depths, dtype=x.dtype, rngs=nnx.Rngs(0)))
