"""Convolutions beside attention: a vision transformer's patch embedding, and Conformer's blocks."""

from __future__ import annotations

from typing import Any

from benchmarks.networks.ops import Ops


def vit_stem(ops: Ops, x: Any) -> Any:
    """The patch embedding of ViT-B/16 (Dosovitskiy et al., 2020), normalized."""
    return ops.layer_norm(ops.conv(x, 768, 16, gain=1, stride=16, padding="none"))


def conformer(ops: Ops, x: Any, features: int, heads: int, count: int) -> Any:
    """Blocks of Conformer (Gulati et al., 2020), without dropout and relative positions."""

    def feed_forward(x: Any) -> Any:
        y = ops.silu(ops.conv(ops.layer_norm(x), 4 * features, 1))
        return x + 0.5 * ops.conv(y, features, 1)

    for _ in range(count):
        x = feed_forward(x)
        x = x + ops.attention(ops.layer_norm(x), features, heads)
        y, gate = ops.halves(ops.conv(ops.layer_norm(x), 2 * features, 1, gain=1))
        y = ops.conv(y * ops.sigmoid(gate), features, 31, gain=1, groups=features, bias=False)
        x = x + ops.conv(ops.batch_norm(y, activation="silu"), features, 1)
        x = ops.layer_norm(feed_forward(x))
    return x
