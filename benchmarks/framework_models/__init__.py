"""The models of flax and equinox whose training steps are measured, written as a user of the framework writes them.

No file of this folder but this one mentions jaxgrad.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

import jax
import optax

CLASSES = 1000


def sgd() -> optax.GradientTransformation:
    """SGD with momentum: its state after one step equals the gradients."""
    return optax.sgd(0.01, momentum=0.9)


class Training(NamedTuple):
    """A model with its optimizer.

    Attributes:
      state: parameters, statistics and optimizer state, a tree of arrays.
      step: `step(state, x, target)` returns the next state and the loss.
    """

    state: Any
    step: Callable[[Any, jax.Array, jax.Array], tuple[Any, jax.Array]]


@dataclasses.dataclass(frozen=True)
class Model:
    """
    Attributes:
      module: of this folder. Its function `training(x, **arguments)` returns a `Training` for inputs as x.
      package: the framework, which `module` imports.
      features: of the input.
      spatial: how many spatial axes the input has.
      arguments: of `training`.
      classifies: whether the target is classes [N]; else it is an array of the sizes of the input.
      outputs: features of the target, where that is an array.
      channels_first: whether the features are the second axis.
      transposed: whether it has transposed convolutions.
    """

    module: str
    package: str
    features: int
    spatial: int
    arguments: dict[str, Any]
    classifies: bool = False
    outputs: int = 1
    channels_first: bool = False
    transposed: bool = False

    @property
    def is_installed(self) -> bool:
        return find_spec(self.package) is not None

    def training(self, x: jax.ShapeDtypeStruct) -> Training:
        return import_module(f"benchmarks.framework_models.{self.module}").training(x, **self.arguments)

    def shape(self, batch: int, size: int, features: int) -> tuple[int, ...]:
        spatial = (size,) * self.spatial
        return (batch, features, *spatial) if self.channels_first else (batch, *spatial, features)


_SMALL = {"stages": ((256, 1, 1), (512, 1, 2), (1024, 1, 2)), "imagenet_stem": False}
_DEEP = {"stages": ((256, 3, 1), (512, 4, 2), (1024, 6, 2), (2048, 3, 2)), "imagenet_stem": True}
_TINY = {"features": (96, 192, 384, 768), "depths": (3, 3, 9, 3)}

MODELS = {
    "nnx-resnext": Model("nnx_resnext", "flax", 3, 2, _SMALL, classifies=True),
    "nnx-resnext50": Model("nnx_resnext", "flax", 3, 2, _DEEP, classifies=True),
    "nnx-convnext-t": Model("nnx_convnext", "flax", 3, 2, _TINY, classifies=True),
    "linen-unet": Model("linen_unet", "flax", 3, 2, {"features": (64, 128, 256, 512)}, transposed=True),
    "linen-unet3d": Model("linen_unet", "flax", 1, 3, {"features": (32, 64, 128, 256)}, transposed=True),
    "equinox-autoencoder": Model(
        *("equinox_autoencoder", "equinox", 3, 2, {"features": (64, 128, 256)}),
        outputs=3,
        channels_first=True,
        transposed=True,
    ),
}
