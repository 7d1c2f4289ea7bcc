"""ResNeXt 32x4d (Xie et al., "Aggregated Residual Transformations for Deep Neural Networks", 2017) in flax.nnx."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
from flax import nnx

from benchmarks.framework_models import CLASSES, Training
from benchmarks.framework_models.nnx_training import classifier_training

_GROUPS = 32
# 0 is usual, where the first gradients of a branch are zero.
_BRANCH_SCALE = nnx.initializers.constant(0.1)


class ConvNorm(nnx.Module):
    def __init__(
        self, inputs: int, features: int, size: int, strides: int = 1, groups: int = 1, scale: Any = None, **kw: Any
    ):
        self.conv = nnx.Conv(inputs, features, (size, size), strides, feature_group_count=groups, use_bias=False, **kw)
        self.norm = nnx.BatchNorm(features, momentum=0.9, scale_init=scale or nnx.initializers.ones, **kw)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.norm(self.conv(x))


class Block(nnx.Module):
    def __init__(self, inputs: int, features: int, strides: int, **kw: Any):
        inner = features // 2
        self.reduce = ConvNorm(inputs, inner, 1, **kw)
        self.grouped = ConvNorm(inner, inner, 3, strides, _GROUPS, **kw)
        self.expand = ConvNorm(inner, features, 1, scale=_BRANCH_SCALE, **kw)
        same = inputs == features and strides == 1
        self.shortcut = None if same else ConvNorm(inputs, features, 1, strides, **kw)

    def __call__(self, x: jax.Array) -> jax.Array:
        y = self.expand(nnx.relu(self.grouped(nnx.relu(self.reduce(x)))))
        return nnx.relu(y + (x if self.shortcut is None else self.shortcut(x)))


class ResNeXt(nnx.Module):
    """`stages`: the features, the number of blocks and the stride of the first block of each stage."""

    def __init__(self, inputs: int, stages: Sequence[tuple[int, int, int]], imagenet_stem: bool, **kw: Any):
        self.stem = ConvNorm(inputs, 64, 7, 2, **kw) if imagenet_stem else ConvNorm(inputs, 64, 3, **kw)
        self.pool = (
            partial(nnx.max_pool, window_shape=(3, 3), strides=(2, 2), padding="SAME") if imagenet_stem else None
        )
        self.blocks = nnx.List([])
        inputs = 64
        for features, count, strides in stages:
            for i in range(count):
                self.blocks.append(Block(inputs, features, strides if i == 0 else 1, **kw))
                inputs = features
        self.head = nnx.Linear(inputs, CLASSES, **kw)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = nnx.relu(self.stem(x))
        x = x if self.pool is None else self.pool(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((1, 2)))


def training(x: jax.ShapeDtypeStruct, stages: Sequence[tuple[int, int, int]], imagenet_stem: bool) -> Training:
    return classifier_training(ResNeXt(x.shape[-1], stages, imagenet_stem, dtype=x.dtype, rngs=nnx.Rngs(0)))
