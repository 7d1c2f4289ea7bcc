"""The networks whose training steps are measured."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

from benchmarks.networks import convnext, ddpm, efficientnet, residual, transformers, unet, wavenet

CLASSES = 1000


@dataclasses.dataclass(frozen=True)
class Network:
    """A network and its training problem.

    Attributes:
      run: `run(ops, x)`.
      features: of the input.
      spatial: how many spatial axes the input has.
      classifies: whether the loss is the cross entropy of classes; else it is the mean squared error to an array.
    """

    run: Callable[..., Any]
    features: int
    spatial: int
    classifies: bool = False


def _classifier(run: Callable[..., Any], **settings: Any) -> Network:
    return Network(partial(run, classes=CLASSES, **settings), 3, 2, classifies=True)


_BASIC = {"branch": residual.basic, "stages": [(64, 2, 1), (128, 2, 2), (256, 2, 2), (512, 2, 2)]}
_DEEP = [(256, 3, 1), (512, 4, 2), (1024, 6, 2), (2048, 3, 2)]
# One bottleneck of ResNeXt-50 for each stage but the last.
_RESNEXT = {"branch": residual.grouped_bottleneck, "stages": [(256, 1, 1), (512, 1, 2), (1024, 1, 2)]}

NETWORKS = {
    "resnext": _classifier(residual.residual, stem=residual.small_stem, **_RESNEXT),
    "mobilenet": _classifier(residual.mobilenet, stages=residual.SMALL_MOBILENET),
    "resnet18": _classifier(residual.residual, stem=residual.imagenet_stem, **_BASIC),
    "resnet18-cifar": _classifier(residual.residual, stem=residual.small_stem, **_BASIC),
    "unet3d": Network(partial(unet.unet, features=(32, 64, 128, 256)), 1, 3),
    "unet": Network(partial(unet.unet, features=(64, 128, 256, 512)), 3, 2),
    "ddpm-unet": Network(partial(ddpm.ddpm_unet, features=128, multipliers=(1, 2, 2, 2)), 3, 2),
    "ddpm-unet-small": Network(partial(ddpm.ddpm_unet, features=64, multipliers=(1, 2)), 3, 2),
    "wavenet": Network(partial(wavenet.wavenet, padding="centered"), 1, 1),
    "wavenet-causal": Network(partial(wavenet.wavenet, padding="causal"), 1, 1),
    "resnet-blocks": Network(partial(residual.bare_bottlenecks, features=256, count=6, inner=64, groups=1), 256, 2),
    "resnext-blocks": Network(partial(residual.bare_bottlenecks, features=256, count=6, inner=128, groups=32), 256, 2),
    "convnext-blocks96": Network(partial(convnext.blocks, features=96, count=6), 96, 2),
    "convnext-blocks384": Network(partial(convnext.blocks, features=384, count=6), 384, 2),
    "resnet50": _classifier(residual.residual, stem=residual.imagenet_stem, branch=residual.bottleneck, stages=_DEEP),
    "resnext50": _classifier(
        residual.residual, stem=residual.imagenet_stem, branch=residual.grouped_bottleneck, stages=_DEEP
    ),
    "convnext-t": _classifier(convnext.convnext_t),
    "mobilenet-v2": _classifier(residual.mobilenet, stages=residual.MOBILENET_V2, first=16),
    "efficientnet-b0": _classifier(efficientnet.efficientnet_b0),
    "vit-stem": Network(transformers.vit_stem, 3, 2),
    "conformer": Network(partial(transformers.conformer, features=512, heads=8, count=2), 512, 1),
}
