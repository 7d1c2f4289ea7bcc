"""Trains a convolutional network with batch normalization to read handwritten digits.

The data are scikit-learn's 1797 digits of 8 x 8 pixels, which come with that package. Every convolution and
batch normalization runs on jaxgrad, and the whole training step is one jitted function.

  pip install ".[examples]"
  python examples/train_digits_cnn.py --model resnext
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import digits
import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import Mesh
from jax.typing import ArrayLike

import jaxgrad

MODELS = ("plain", "resnext", "mobilenet")
MOMENTUM = 0.9  # of the running statistics


class Conv(NamedTuple):
    """A convolution without bias, then batch normalization."""

    window: int
    features: int
    stride: int = 1
    groups: int = 1
    activation: str | None = "relu"


class Layer(NamedTuple):
    """The parameters of a `Conv` of C features."""

    w: jax.Array  # [window, window, inputs of a group, C]
    scale: jax.Array  # [C]
    bias: jax.Array  # [C]


class Params(NamedTuple):
    layers: list[Layer]
    head_w: jax.Array  # [C, 10]
    head_b: jax.Array  # [10]


class Statistics(NamedTuple):
    """Running averages over the batches, of what a `Conv` computes."""

    mean: jax.Array  # [C]
    var: jax.Array  # [C]


class State(NamedTuple):
    """All that a training step takes and returns."""

    params: Params
    statistics: list[Statistics]
    optimizer: Any
    key: jax.Array  # of the shifts


Block = tuple[Conv, ...]  # its input is added before the last activation, where it has the output's shape


def network(model: str) -> list[Block]:
    """A stage of 8 x 8 pixels and 32 features, then one of 4 x 4 pixels and 64 features."""

    def block(features: int) -> Block:
        if model == "resnext":
            return Conv(1, 2 * features), Conv(3, 2 * features, groups=32), Conv(1, features)
        if model == "mobilenet":
            return Conv(1, 4 * features), Conv(3, 4 * features, groups=4 * features), Conv(1, features, activation=None)
        return Conv(3, features), Conv(3, features)

    return [(Conv(3, 32),), block(32), (Conv(3, 64, stride=2),), block(64), block(64)]


def initial(key: jax.Array, blocks: Sequence[Block]) -> tuple[Params, list[Statistics]]:
    """He's normal weights for the convolutions; a head of zeros, so that the first loss is log 10."""
    convs = list(itertools.chain(*blocks))
    inputs = (1, *(conv.features for conv in convs))
    layers, statistics = [], []
    for conv, n, layer_key in zip(convs, inputs, jax.random.split(key, len(convs)), strict=False):
        w = jax.nn.initializers.he_normal()(layer_key, (conv.window, conv.window, n // conv.groups, conv.features))
        zeros, ones = jnp.zeros(conv.features), jnp.ones(conv.features)
        layers.append(Layer(w, ones, zeros))
        statistics.append(Statistics(zeros, ones))
    return Params(layers, jnp.zeros((inputs[-1], digits.CLASSES)), jnp.zeros(digits.CLASSES)), statistics


def conv_batch_norm(
    conv: Conv,
    layer: Layer,
    running: Statistics,
    x: jax.Array,
    residual: jax.Array | None,
    train: bool,
    **settings: Any,
) -> tuple[jax.Array, Statistics]:
    """One `Conv` of x [N, H, W, inputs], and the running statistics after it."""
    y = jaxgrad.conv_general_dilated(
        x,
        layer.w,
        (conv.stride, conv.stride),
        "SAME",
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
        feature_group_count=conv.groups,
        **settings,
    )
    if residual is not None and residual.shape != y.shape:
        residual = None
    if train:
        # The sum and the activation are part of the kernel.
        y, *batch = jaxgrad.batch_norm_training(
            y, layer.scale, layer.bias, residual=residual, activation=conv.activation, **settings
        )
        averages = (MOMENTUM * old + (1 - MOMENTUM) * new for old, new in zip(running, batch, strict=True))
        return y, Statistics(*averages)
    y = jaxgrad.batch_norm_inference(y, layer.scale, layer.bias, *running, **settings)
    y = y if residual is None else y + residual
    return jax.nn.relu(y) if conv.activation == "relu" else y, running


def evaluate(
    blocks: Sequence[Block],
    params: Params,
    statistics: Sequence[Statistics],
    images: ArrayLike,
    labels: ArrayLike,
    **settings: Any,
) -> tuple[jax.Array, tuple[jax.Array, list[Statistics]]]:
    """The mean loss on images [N, 8, 8], then the accuracy and the next running statistics."""
    x, found = jnp.asarray(images)[..., None], []
    layers = zip(params.layers, statistics, strict=True)
    for block in blocks:
        block_input = x
        for i, conv in enumerate(block, start=1):
            residual = block_input if i == len(block) else None
            x, running = conv_batch_norm(conv, *next(layers), x, residual, **settings)
            found.append(running)
    scores = x.mean((1, 2)) @ params.head_w + params.head_b
    losses = optax.softmax_cross_entropy_with_integer_labels(scores, labels)
    return losses.mean(), ((scores.argmax(1) == labels).mean(), found)


def shifted(key: jax.Array, images: ArrayLike) -> jax.Array:
    """Each of the images [N, 8, 8] moved by up to one pixel along both axes."""
    images = jnp.asarray(images)
    starts = jax.random.randint(key, (len(images), 2), 0, 3)
    padded = jnp.pad(images, ((0, 0), (1, 1), (1, 1)))
    return jax.vmap(lambda image, start: lax.dynamic_slice(image, start, images.shape[1:]))(padded, starts)


def train(
    data: digits.Digits, args: argparse.Namespace, implementation: str | None, mesh: Mesh | None = None
) -> list[digits.Epoch]:
    blocks = network(args.model)
    steps = args.epochs * digits.steps_per_epoch(data, args)
    optimizer = optax.adamw(optax.cosine_decay_schedule(args.learning_rate, steps), weight_decay=1e-2)

    def step(state: State, images: ArrayLike, labels: ArrayLike) -> tuple[State, jax.Array]:
        key, shift_key = jax.random.split(state.key)

        def loss_of(params: Params) -> tuple[jax.Array, tuple[jax.Array, list[Statistics]]]:
            x = shifted(shift_key, images)
            return evaluate(blocks, params, state.statistics, x, labels, train=True, implementation=implementation)

        (loss, (_, statistics)), gradients = jax.value_and_grad(loss_of, has_aux=True)(state.params)
        updates, optimizer_state = optimizer.update(gradients, state.optimizer, state.params)
        return State(optax.apply_updates(state.params, updates), statistics, optimizer_state, key), loss

    def test(state: State) -> dict[str, jax.Array]:
        split = data.images_test, data.labels_test
        loss, (accuracy, _) = evaluate(
            blocks, state.params, state.statistics, *split, train=False, implementation=implementation
        )
        return {"loss": loss, "accuracy": accuracy}

    params_key, shifts_key = jax.random.split(jax.random.key(args.seed))
    params, statistics = initial(params_key, blocks)
    state = State(params, statistics, optimizer.init(params), shifts_key)
    return digits.fit(step, state, data, test, args, mesh)[1]


def argument_parser(description: str, plot: str) -> argparse.ArgumentParser:
    parser = digits.argument_parser(description, epochs=40, batch_size=64, learning_rate=5e-3, plot=plot)
    parser.add_argument("--model", choices=MODELS, default="plain", help="the kind of its residual blocks")
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    description = "Trains a convolutional network to read scikit-learn's handwritten digits."
    args = argument_parser(description, "train_digits_cnn.png").parse_args(arguments)
    implementation = digits.implementation(
        args, jaxgrad.conv_general_dilated, jaxgrad.batch_norm_training, jaxgrad.batch_norm_inference
    )
    data = digits.load(args.seed)
    history = train(data, args, implementation)
    digits.save_curves(history, args.plot)
    digits.print_accuracy(history, data)
    digits.print_step_time(history)
    print(f"curves: {args.plot}")


if __name__ == "__main__":
    main()
