"""The U-Net of denoising diffusion (Ho et al., "Denoising Diffusion Probabilistic Models", 2020)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.networks.ops import Ops

_BLOCKS = 2  # of each level on the way down, one more on the way up
_ATTENDED = 1  # the level with self-attention, of 16x16 positions for images of 32x32


def ddpm_unet(ops: Ops, x: Any, features: int, multipliers: Sequence[int]) -> Any:
    """The noise in x at a time of each example, without dropout.

    `multipliers` of the features are those of the levels, each of half the size of the one above it.
    """
    time = ops.dense(ops.time_embedding(x, features), 4 * features)
    time = ops.silu(ops.dense(ops.silu(time), 4 * features))

    def block(x: Any, inputs: int, count: int, level: int) -> Any:
        y = ops.conv(ops.group_norm(x), count, 3, gain=1)
        y = y + ops.at_each_position(ops.dense(time, count), y)
        y = ops.conv(ops.group_norm(y), count, 3, gain=1)
        x = y + (x if inputs == count else ops.conv(x, count, 1, gain=1))
        return attended(x, count) if level == _ATTENDED else x

    def attended(x: Any, count: int) -> Any:
        return x + ops.attention(ops.group_norm(x, activation=None), count, 1)

    counts = [features * each for each in multipliers]
    x, inputs = ops.conv(x, features, 3, gain=1), features
    skips = [(x, features)]
    for level, count in enumerate(counts):
        if level:
            x = ops.conv(x, inputs, 3, gain=1, stride=2)
            skips.append((x, inputs))
        for _ in range(_BLOCKS):
            x, inputs = block(x, inputs, count, level), count
            skips.append((x, inputs))
    x = block(attended(block(x, inputs, inputs, -1), inputs), inputs, inputs, -1)
    for level, count in reversed(list(enumerate(counts))):
        for _ in range(_BLOCKS + 1):
            skip, more = skips.pop()
            x, inputs = block(ops.concatenate(x, skip), inputs + more, count, level), count
        if level:
            x = ops.conv(ops.upsample(x), inputs, 3, gain=1)
    return ops.conv(ops.group_norm(x), 3, 3, gain=1)
