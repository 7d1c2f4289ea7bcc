"""ConvNeXt (Liu et al., "A ConvNet for the 2020s", 2022)."""

from __future__ import annotations

from typing import Any

from benchmarks.networks.ops import Ops

# 1e-6 in the paper. At 0.1 a loss shows what the branches compute.
_LAYER_SCALE = 0.1


def blocks(ops: Ops, x: Any, features: int, count: int) -> Any:
    """Blocks without their norms: a depthwise window, four times the features and back, and what came is added."""
    for _ in range(count):
        y = ops.conv(x, features, 7, gain=1, groups=features)
        x = x + ops.conv(ops.gelu(ops.conv(y, 4 * features, 1)), features, 1, gain=1 / count)
    return x


def convnext_t(ops: Ops, x: Any, classes: int) -> Any:
    """The smallest, without its stochastic depth."""
    for stage, (features, depth) in enumerate(((96, 3), (192, 3), (384, 9), (768, 3))):
        if stage == 0:
            x = ops.layer_norm(ops.conv(x, features, 4, stride=4, padding="none"))
        else:
            x = ops.conv(ops.layer_norm(x), features, 2, stride=2, padding="none")
        for _ in range(depth):
            y = ops.layer_norm(ops.conv(x, features, 7, gain=1, groups=features))
            y = ops.conv(ops.gelu(ops.conv(y, 4 * features, 1)), features, 1)
            x = x + ops.scale(y, _LAYER_SCALE)
    return ops.dense(ops.layer_norm(ops.mean(x)), classes)
