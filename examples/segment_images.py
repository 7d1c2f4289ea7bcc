"""Trains a U-Net of flax to find the coins in a photograph, without and with `jaxgrad.accelerate`.

The photograph comes with scikit-image: Greek coins from Pompeii on a background whose brightness varies. The target is
the segmentation of scikit-image's own guide, a watershed on the edges. The U-Net (Ronneberger et al., "U-Net:
Convolutional Networks for Biomedical Image Segmentation", 2015) is trained on random crops of the right half, and
tested on the left half by the intersection over union. There the background is as bright as some coins, and the
baseline, the threshold of Otsu, takes parts of it for coins.

  pip install ".[examples]"
  python examples/segment_images.py
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import training
from jax.typing import ArrayLike
from matplotlib.figure import Figure
from scipy.ndimage import binary_fill_holes
from skimage import data, filters, segmentation

import jaxgrad

FEATURES = (16, 32, 64)  # of the levels; each has half the height and width of the level above it
CROP = 96  # height and width of a crop
MULTIPLE = 2 ** (len(FEATURES) - 1)  # of the sizes of an image


class Split(NamedTuple):
    """Pixels [H, W] in [0, 1], and where the coins are."""

    image: np.ndarray
    coins: np.ndarray


class DoubleConv(nn.Module):
    features: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for _ in range(2):
            x = nn.relu(nn.Conv(self.features, (3, 3))(x))
        return x


class UNet(nn.Module):
    """The logits [N, H, W] of a pixel being of a coin, for images [N, H, W]."""

    @nn.compact
    def __call__(self, images: ArrayLike) -> jax.Array:
        x, skips = jnp.asarray(images)[..., None], []
        *above, bottom = FEATURES
        for features in above:
            x = DoubleConv(features)(x)
            skips.append(x)
            x = nn.max_pool(x, (2, 2), (2, 2))
        x = DoubleConv(bottom)(x)
        for features in reversed(above):
            x = nn.ConvTranspose(features, (2, 2), (2, 2))(x)
            x = DoubleConv(features)(jnp.concatenate([skips.pop(), x], axis=-1))
        return nn.Conv(1, (1, 1))(x)[..., 0]


def load() -> tuple[Split, Split]:
    """The right half, to train on, and the left one, both cut to sizes that the U-Net can halve."""
    photograph = data.coins()
    markers = np.select([photograph < 30, photograph > 150], [1, 2])
    coins = binary_fill_holes(segmentation.watershed(filters.sobel(photograph), markers) == 2)
    height, width = (size // MULTIPLE * MULTIPLE for size in (photograph.shape[0], photograph.shape[1] // 2))
    halves = [(slice(height), slice(start, start + width)) for start in (photograph.shape[1] // 2, 0)]
    train, test = (Split((photograph[half] / 255).astype(np.float32), coins[half]) for half in halves)
    return train, test


def crops(rng: np.random.Generator, split: Split, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Random crops [count, CROP, CROP] of the image and of the coins, turned, mirrored, and lit from one side."""
    images, coins = [], []
    for _ in range(count):
        top, left = (rng.integers(size - CROP + 1) for size in split.image.shape)
        turns, step = rng.integers(4), rng.choice([-1, 1])
        image, target = (np.rot90(a[top : top + CROP, left : left + CROP], turns)[::step] for a in split)
        images.append(image * rng.uniform(0.7, 1.3) + np.linspace(*rng.uniform(-0.2, 0.4, 2), CROP))
        coins.append(target)
    return np.array(images, np.float32), np.array(coins, np.float32)


def overlap(found: np.ndarray, coins: np.ndarray) -> float:
    """The intersection over union."""
    return np.sum(found & coins) / np.sum(found | coins)


def main(arguments: Sequence[str] | None = None) -> None:
    description = "Trains a U-Net to find the coins in a photograph, without and with jaxgrad.accelerate."
    args = training.argument_parser(
        description, steps=250, learning_rate=2e-3, batch_size=4, plot="segment_images.png"
    ).parse_args(arguments)
    train, test = load()
    model = UNet()
    optimizer = optax.adam(optax.cosine_decay_schedule(args.learning_rate, args.steps))

    def loss_of(params: Any, images: ArrayLike, coins: ArrayLike) -> jax.Array:
        return optax.sigmoid_binary_cross_entropy(model.apply(params, images), coins).mean()

    def batch(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        return crops(rng, train, args.batch_size)

    step = training.gradient_step(loss_of, optimizer)
    accelerated = jaxgrad.accelerate(step)
    params = model.init(jax.random.key(args.seed), train.image[None])
    state, history = training.fit(accelerated, training.State(params, optimizer.init(params)), batch, args)
    found = np.asarray(jax.jit(model.apply)(state.params, test.image[None])[0] > 0)
    otsu = test.image > filters.threshold_otsu(test.image)
    scores = overlap(found, test.coins), overlap(otsu, test.coins)
    print("test intersection over union: {:.3f}, by Otsu's threshold {:.3f}".format(*scores))
    training.print_step_times(step, accelerated, state, *batch(np.random.default_rng(args.seed)))
    images = {"test image": test.image, "target": test.coins, "U-Net": found, "Otsu's threshold": otsu}
    save_picture(images, history, args.plot)
    print(f"the left half, its segmentations and the loss: {args.plot}")


def save_picture(images: dict[str, np.ndarray], history: dict[str, np.ndarray], path: Path) -> None:
    figure = Figure(figsize=(12, 4), layout="constrained")
    *frames, curve = figure.subplots(1, len(images) + 1, width_ratios=[1] * len(images) + [1.5])
    for axes, (title, pixels) in zip(frames, images.items(), strict=True):
        training.show_image(axes, pixels, title)
    training.draw_curves(curve, history, "cross entropy (nats)")
    figure.savefig(path, dpi=100)


if __name__ == "__main__":
    main()
