"""EfficientNet (Tan and Le, 2019)."""

from __future__ import annotations

from typing import Any

from benchmarks.networks.ops import Ops
from benchmarks.networks.residual import normalized

# Of EfficientNet-B0: features, blocks, stride of the first block, window, expansion of the features.
_STAGES = [
    (16, 1, 1, 3, 1),
    (24, 2, 2, 3, 6),
    (40, 2, 2, 5, 6),
    (80, 3, 2, 3, 6),
    (112, 3, 1, 5, 6),
    (192, 4, 2, 5, 6),
    (320, 1, 1, 3, 6),
]


def _activated(ops: Ops, x: Any, features: int, size: int, **settings: Any) -> Any:
    return normalized(ops, x, features, size, activation="silu", **settings)


def _squeezed(ops: Ops, x: Any, features: int, inner: int) -> Any:
    """x with gates for each of its features, from their means."""
    gates = ops.dense(ops.silu(ops.dense(ops.mean(x), inner)), features)
    return x * ops.at_each_position(ops.sigmoid(gates), x)


def efficientnet_b0(ops: Ops, x: Any, classes: int) -> Any:
    """Without its dropout and stochastic depth."""
    x, inputs = _activated(ops, x, 32, 3, stride=2), 32
    for features, count, first, size, expansion in _STAGES:
        for i in range(count):
            stride, inner = first if i == 0 else 1, expansion * inputs
            y = x if expansion == 1 else _activated(ops, x, inner, 1)
            y = _activated(ops, y, inner, size, stride=stride, groups=inner)
            y = _squeezed(ops, y, inner, inputs // 4)
            shortcut = x if stride == 1 and inputs == features else None
            x = ops.batch_norm(ops.conv(y, features, 1, bias=False), residual=shortcut, activation=None)
            inputs = features
    return ops.dense(ops.mean(_activated(ops, x, 1280, 1)), classes)
