"""U-Net (Ronneberger et al., 2015; in three dimensions Cicek et al., 2016), padded so that it keeps the size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.networks.ops import Ops


def unet(ops: Ops, x: Any, features: Sequence[int]) -> Any:
    """One output for each place; `features` are those of the levels, each of half the size of the one above it."""

    def convs(x: Any, count: int) -> Any:
        for _ in range(2):
            x = ops.conv(x, count, 3, relu=True)
        return x

    *above, bottom = features
    skips = []
    for count in above:
        x = convs(x, count)
        skips.append(x)
        x = ops.max_pool(x, 2, 2)
    x = convs(x, bottom)
    for count in reversed(above):
        x = convs(ops.concatenate(skips.pop(), ops.conv_transpose(x, count, 2)), count)
    return ops.conv(x, 1, 1, gain=1)
