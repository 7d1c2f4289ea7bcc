"""Trains a ResNeXt of flax.nnx to read handwritten digits, without and with `jaxgrad.accelerate`.

The model and the training step are plain flax: a ResNeXt (Xie et al., "Aggregated Residual Transformations for Deep
Neural Networks", 2017) with batch normalization, `nnx.Optimizer`, `nnx.value_and_grad` and `nnx.jit`. The only change
is `jaxgrad.accelerate(train_step)`.

  pip install ".[examples]"
  python examples/accelerate_nnx.py
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import comparing
import digits
import jax
import numpy as np
import optax
from flax import nnx

import jaxgrad

# --- the model and its training step: plain flax -------------------------------------------------------------------


class Block(nnx.Module):
    """A bottleneck of ResNeXt: its 3x3 convolution has groups."""

    def __init__(self, inputs: int, features: int, strides: int, groups: int, rngs: nnx.Rngs):
        self.reduce = nnx.Conv(inputs, features, (1, 1), use_bias=False, rngs=rngs)
        self.grouped = nnx.Conv(
            features, features, (3, 3), strides, feature_group_count=groups, use_bias=False, rngs=rngs
        )
        self.expand = nnx.Conv(features, features, (1, 1), use_bias=False, rngs=rngs)
        self.shortcut = nnx.Conv(inputs, features, (1, 1), strides, use_bias=False, rngs=rngs)
        self.norms = nnx.List([nnx.BatchNorm(features, momentum=0.9, rngs=rngs) for _ in range(4)])

    def __call__(self, x: jax.Array) -> jax.Array:
        y = nnx.relu(self.norms[0](self.reduce(x)))
        y = nnx.relu(self.norms[1](self.grouped(y)))
        return nnx.relu(self.norms[2](self.expand(y)) + self.norms[3](self.shortcut(x)))


class ResNeXt(nnx.Module):
    def __init__(self, features: Sequence[int], groups: int, classes: int, rngs: nnx.Rngs):
        self.stem = nnx.Conv(1, features[0], (3, 3), use_bias=False, rngs=rngs)
        self.norm = nnx.BatchNorm(features[0], momentum=0.9, rngs=rngs)
        self.blocks = nnx.List([Block(features[0], features[0], 1, groups, rngs)])
        for inputs, count in itertools.pairwise(features):
            self.blocks.append(Block(inputs, count, 2, groups, rngs))
        self.head = nnx.Linear(features[-1], classes, rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        x = nnx.relu(self.norm(self.stem(images[..., None])))
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((1, 2)))


def loss_fn(model: ResNeXt, images: jax.Array, labels: jax.Array) -> tuple[jax.Array, jax.Array]:
    logits = model(images)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean(), logits


@nnx.jit
def train_step(model: ResNeXt, optimizer: nnx.Optimizer, images: jax.Array, labels: jax.Array) -> jax.Array:
    (loss, _), gradients = nnx.value_and_grad(loss_fn, has_aux=True)(model, images, labels)
    optimizer.update(model, gradients)
    return loss


@nnx.jit
def test_step(model: ResNeXt, images: jax.Array, labels: jax.Array) -> dict[str, jax.Array]:
    loss, logits = loss_fn(model, images, labels)
    return {"loss": loss, "accuracy": (logits.argmax(1) == labels).mean()}


# --- training, without and with jaxgrad.accelerate ------------------------------------------------------------------


def created(data: digits.Digits, args: argparse.Namespace) -> tuple[ResNeXt, nnx.Optimizer]:
    model = ResNeXt((64, 128), 32, digits.CLASSES, nnx.Rngs(args.seed))
    steps = args.epochs * digits.steps_per_epoch(data, args)
    schedule = optax.cosine_decay_schedule(args.learning_rate, steps)
    return model, nnx.Optimizer(model, optax.adamw(schedule, weight_decay=1e-2), wrt=nnx.Param)


def train(train_step: Callable[..., jax.Array], data: digits.Digits, args: argparse.Namespace) -> comparing.Run:
    def step(state: tuple[ResNeXt, nnx.Optimizer], *batch: np.ndarray) -> tuple[Any, jax.Array]:
        return state, train_step(*state, *batch)  # updates the state in place

    def test(state: tuple[ResNeXt, nnx.Optimizer]) -> dict[str, jax.Array]:
        model, _ = state
        model.eval()  # batch normalization with the running averages
        found = test_step(model, data.images_test, data.labels_test)
        model.train()
        return found

    return comparing.fit(step, created(data, args), data, test, args)


def main(arguments: Sequence[str] | None = None) -> None:
    args = digits.argument_parser(
        "Trains a ResNeXt of flax.nnx on scikit-learn's handwritten digits, without and with jaxgrad.accelerate.",
        epochs=20,
        batch_size=64,
        learning_rate=5e-3,
        plot="accelerate_nnx.png",
        ops=False,
    ).parse_args(arguments)
    data = digits.load(args.seed)
    run = comparing.both_ways(train, train_step, data, args)
    batch = data.images_train[: args.batch_size], data.labels_train[: args.batch_size]
    print(jaxgrad.report(jaxgrad.accelerate(train_step), *run.state, *batch))
    digits.print_accuracy(run.epochs, data)
    digits.save_curves(run.epochs, args.plot)
    print(f"curves: {args.plot}")


if __name__ == "__main__":
    main()
