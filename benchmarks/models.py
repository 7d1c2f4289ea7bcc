"""Networks of convolutions and batch normalisations, said once for every library that runs them.

A network is a list of `Conv`; `scores` runs it with the operations of a `Library`, whose arrays have whatever layout
that likes. Activations are [N, H, W, C] for JAX; weights are [window, window, inputs of a group, features].
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

CLASSES = 1000


@dataclasses.dataclass(frozen=True)
class Conv:
    """A convolution without bias and with a window that is centred, then batch normalisation, then relu or nothing."""

    window: int
    features: int
    stride: int = 1
    groups: int = 1
    relu: bool = True


@dataclasses.dataclass(frozen=True)
class Block:
    """Convolutions, one after the other; the shortcut is added before the last relu.

    Attributes:
      shortcut: None for none, "identity" for the block's input, or the convolution that it goes through.
      max_pool: whether the largest of every 3 x 3 pixels is taken at the end, with a stride of 2.
    """

    convs: tuple[Conv, ...]
    shortcut: Conv | str | None = None
    max_pool: bool = False


@dataclasses.dataclass(frozen=True)
class Network:
    """Blocks, of which the first is the stem, then the mean over all pixels and a dense layer."""

    blocks: tuple[Block, ...]

    def convs(self) -> Iterator[tuple[int, Conv]]:
        """Each convolution with its number of input features, in the order that `scores` runs them."""
        features = 3
        for block in self.blocks:
            if isinstance(block.shortcut, Conv):
                yield features, block.shortcut
            for conv in block.convs:
                yield features, conv
                features = conv.features


class Layer(NamedTuple):
    """The parameters of a `Conv` of C features."""

    w: Any  # [window, window, inputs of a group, C]
    scale: Any  # [C]
    bias: Any  # [C]


class Params(NamedTuple):
    layers: list[Layer]
    head_w: Any  # [C, classes]
    head_b: Any  # [classes]


class Library(NamedTuple):
    """The operations that a network needs.

    Attributes:
      conv: `conv(x, w, conv)`, padded so that a stride of 1 keeps the size.
      batch_norm: `batch_norm(x, scale, bias, residual, relu)`, which returns y, mean and var [C]; residual may be None.
      max_pool: the largest of every 3 x 3 pixels, with a stride of 2 and a padding of 1.
      mean: over all pixels, [N, C].
    """

    conv: Callable[..., Any]
    batch_norm: Callable[..., Any]
    max_pool: Callable[[Any], Any]
    mean: Callable[[Any], Any]


def scores(library: Library, network: Network, params: Params, x: Any) -> tuple[Any, list[tuple[Any, Any]]]:
    """The scores [N, classes] of a batch, and each batch normalisation's (mean, var)."""
    layers, statistics = iter(params.layers), []

    def run(conv: Conv, x: Any, residual: Any) -> Any:
        layer = next(layers)
        y, *found = library.batch_norm(library.conv(x, layer.w, conv), layer.scale, layer.bias, residual, conv.relu)
        statistics.append(tuple(found))
        return y

    for block in network.blocks:
        residual = x if block.shortcut == "identity" else None
        if isinstance(block.shortcut, Conv):
            residual = run(block.shortcut, x, None)
        *inner, last = block.convs
        for conv in inner:
            x = run(conv, x, None)
        x = run(last, x, residual)
        x = library.max_pool(x) if block.max_pool else x
    return library.mean(x) @ params.head_w + params.head_b, statistics


def initial_params(network: Network, key: jax.Array) -> Params:
    convs = list(network.convs())
    keys = jax.random.split(key, len(convs) + 1)
    layers = []
    for (inputs, conv), conv_key in zip(convs, keys[:-1], strict=True):
        shape = (conv.window, conv.window, inputs // conv.groups, conv.features)
        w = jax.nn.initializers.he_normal()(conv_key, shape)
        layers.append(Layer(w, jnp.ones(conv.features), jnp.zeros(conv.features)))
    features = network.blocks[-1].convs[-1].features
    head_w = jax.nn.initializers.lecun_normal()(keys[-1], (features, CLASSES))
    return Params(layers, head_w, jnp.zeros(CLASSES))


# --- the networks -------------------------------------------------------------------------------------------------


def resnet18(stem: Block) -> Network:
    """He et al., "Deep Residual Learning" (2015)."""
    stages = [(64, 2, 1), (128, 2, 2), (256, 2, 2), (512, 2, 2)]
    return Network(
        (stem, *_residual(64, stages, lambda features, stride: (Conv(3, features, stride), Conv(3, features))))
    )


def resnext() -> Network:
    """Bottlenecks of ResNeXt-50 32x4d (Xie et al., 2016), one for each stage but the last, on a first window of 3."""

    def bottleneck(features: int, stride: int) -> tuple[Conv, ...]:
        inner = features // 2
        return Conv(1, inner), Conv(3, inner, stride, groups=32), Conv(1, features)

    return Network((Block((Conv(3, 64),)), *_residual(64, [(256, 1, 1), (512, 1, 2), (1024, 1, 2)], bottleneck)))


def mobilenet() -> Network:
    """The inverted residuals of MobileNetV2 (Sandler et al., 2018), with relu for relu6, on a first window of 3."""

    def inverted(inputs: int, features: int, stride: int) -> Block:
        inner = 6 * inputs
        convs = (Conv(1, inner), Conv(3, inner, stride, groups=inner), Conv(1, features, relu=False))
        return Block(convs, "identity" if stride == 1 and inputs == features else None)

    blocks, inputs = [Block((Conv(3, 32, stride=2),))], 32
    for features, count, stride in [(24, 2, 1), (32, 3, 2), (64, 3, 2), (96, 2, 1)]:
        for i in range(count):
            blocks.append(inverted(inputs, features, stride if i == 0 else 1))
            inputs = features
    return Network((*blocks, Block((Conv(1, 1280),))))


def _residual(
    inputs: int, stages: Sequence[tuple[int, int, int]], convs: Callable[[int, int], tuple[Conv, ...]]
) -> list[Block]:
    """Stages of (features, blocks, stride of the first block)."""
    blocks = []
    for features, count, stride in stages:
        for i in range(count):
            first = stride if i == 0 else 1
            same = first == 1 and inputs == features
            shortcut = "identity" if same else Conv(1, features, first, relu=False)
            blocks.append(Block(convs(features, first), shortcut))
            inputs = features
    return blocks


NETWORKS = {
    "resnext": resnext(),
    "mobilenet": mobilenet(),
    "resnet18": resnet18(Block((Conv(7, 64, stride=2),), max_pool=True)),
    "resnet18-cifar": resnet18(Block((Conv(3, 64),))),  # the usual stem for small images, which keeps their size
}
