"""Residual networks, whole ones with batch normalization and bare blocks without."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.networks.ops import Ops

# ops, x, features, stride of the block -> y before the last batch normalization, which adds the shortcut
_Branch = Callable[[Ops, Any, int, int], Any]
_Stem = Callable[[Ops, Any], Any]
# 0 is usual: a deep network then starts as a shallow one, and its first gradients are no chaos. Above that, the loss
# shows what the branches compute.
_BRANCH_SCALE = 0.1
_Stages = Sequence[tuple[int, int, int]]  # features, blocks, stride of the first block


def normalized(ops: Ops, x: Any, features: int, size: int, *, activation: str | None = "relu", **settings: Any) -> Any:
    return ops.batch_norm(ops.conv(x, features, size, bias=False, **settings), activation=activation)


def imagenet_stem(ops: Ops, x: Any) -> Any:
    return ops.max_pool(normalized(ops, x, 64, 7, stride=2), 3, 2, 1)


def small_stem(ops: Ops, x: Any) -> Any:
    """For small images, whose size it keeps."""
    return normalized(ops, x, 64, 3)


def basic(ops: Ops, x: Any, features: int, stride: int) -> Any:
    """Of ResNet-18 and -34 (He et al., "Deep Residual Learning", 2015)."""
    return ops.conv(normalized(ops, x, features, 3, stride=stride), features, 3, bias=False)


def bottleneck(ops: Ops, x: Any, features: int, stride: int) -> Any:
    """Of ResNet-50, with the stride on the window of 3 as all write it since."""
    x = normalized(ops, normalized(ops, x, features // 4, 1), features // 4, 3, stride=stride)
    return ops.conv(x, features, 1, bias=False)


def grouped_bottleneck(ops: Ops, x: Any, features: int, stride: int) -> Any:
    """Of ResNeXt 32x4d (Xie et al., 2016)."""
    x = normalized(ops, normalized(ops, x, features // 2, 1), features // 2, 3, stride=stride, groups=32)
    return ops.conv(x, features, 1, bias=False)


def residual(ops: Ops, x: Any, classes: int, stem: _Stem, branch: _Branch, stages: _Stages) -> Any:
    """A stem, stages of blocks, the mean over all places and a dense layer."""
    x, inputs = stem(ops, x), 64
    for features, count, first in stages:
        for i in range(count):
            stride = first if i == 0 else 1
            same = stride == 1 and inputs == features
            shortcut = x if same else normalized(ops, x, features, 1, stride=stride, activation=None)
            x, inputs = (
                ops.batch_norm(branch(ops, x, features, stride), residual=shortcut, scale=_BRANCH_SCALE),
                features,
            )
    return ops.dense(ops.mean(x), classes)


SMALL_MOBILENET = [(24, 2, 1), (32, 3, 2), (64, 3, 2), (96, 2, 1)]
MOBILENET_V2 = [(24, 2, 2), (32, 3, 2), (64, 4, 2), (96, 3, 1), (160, 3, 2), (320, 1, 1)]


def mobilenet(ops: Ops, x: Any, classes: int, stages: _Stages, first: int | None = None) -> Any:
    """The inverted residuals of MobileNetV2 (Sandler et al., 2018), with relu for relu6, on a first window of 3.

    `first` is the number of features after a first block that does not expand its input; None for no such block.
    """
    x, inputs = normalized(ops, x, 32, 3, stride=2), 32
    if first is not None:
        y = normalized(ops, x, inputs, 3, groups=inputs)
        x, inputs = normalized(ops, y, first, 1, activation=None), first
    for features, count, first_stride in stages:
        for i in range(count):
            stride, inner = first_stride if i == 0 else 1, 6 * inputs
            y = normalized(ops, normalized(ops, x, inner, 1), inner, 3, stride=stride, groups=inner)
            shortcut = x if stride == 1 and inputs == features else None
            x = ops.batch_norm(ops.conv(y, features, 1, bias=False), residual=shortcut, activation=None)
            inputs = features
    return ops.dense(ops.mean(normalized(ops, x, 1280, 1)), classes)


def bare_bottlenecks(ops: Ops, x: Any, features: int, count: int, inner: int, groups: int) -> Any:
    """Bottlenecks without their norms; what came is added before the last relu."""
    for _ in range(count):
        y = ops.conv(x, inner, 1, relu=True)
        y = ops.conv(y, inner, 3, relu=True, groups=groups)
        x = ops.relu(ops.conv(y, features, 1, gain=1 / count) + x)
    return x
