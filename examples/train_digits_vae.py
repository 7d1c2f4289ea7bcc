"""Trains a conditional, convolutional variational autoencoder on handwritten digits, and draws new ones.

The data are scikit-learn's 1797 digits of 8 x 8 pixels, which come with that package. A pixel counts how many of the 16
dots of a finer bitmap are set, so the decoder's likelihood is a binomial distribution of 16 trials for each pixel. The
encoder's convolutions halve the image twice; the decoder's transposed convolutions, `jaxgrad.conv_transpose`, double it
twice. Both take the digit's class as input, so that the latent variables are left with its style. The loss is the
negative evidence lower bound (ELBO) of Kingma and Welling, "Auto-Encoding Variational Bayes" (2013), of
log p(image | class).

  pip install ".[examples]"
  python examples/train_digits_vae.py
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any, NamedTuple

import digits
import jax
import jax.numpy as jnp
import numpy as np
import optax
import training
from jax.scipy.special import gammaln
from jax.typing import ArrayLike
from matplotlib.figure import Figure

import jaxgrad

HIDDEN = 256  # units of the dense layers
FEATURES = (32, 64)  # of the layers at 4 x 4 and at 2 x 2 pixels
CORNER = (2, 2, FEATURES[1])  # the shape of the smallest layer
LAYOUT = ("NHWC", "HWIO", "NHWC")
WEIGHT_DECAY = 0.1
TEST_SAMPLES = 20  # of the latent variables of each test digit
GENERATED = 8  # digits of each class in the picture


class Layer(NamedTuple):
    """A convolution or a dense layer."""

    w: jax.Array  # [window, window, inputs, outputs] or [inputs, outputs]
    b: jax.Array  # [outputs]


class Params(NamedTuple):
    """With Z latent variables."""

    encoder: list[Layer]  # convolutions of stride 2: 8 x 8 pixels to 4 x 4, to 2 x 2
    posterior: list[Layer]  # dense, from that and the class to the means and log variances [2 Z]
    corner: list[Layer]  # dense, from [Z] and the class to 2 x 2 pixels
    decoder: list[Layer]  # transposed convolutions of stride 2: 2 x 2 pixels to 4 x 4, to 8 x 8


class State(NamedTuple):
    """All that a training step takes and returns."""

    params: Params
    optimizer: Any
    key: jax.Array  # of the latent variables' noise


def initial_params(key: jax.Array, latents: int) -> Params:
    keys = iter(jax.random.split(key, 8))

    def layer(*shape: int) -> Layer:
        return Layer(jax.nn.initializers.he_normal()(next(keys), shape), jnp.zeros(shape[-1]))

    size = int(np.prod(CORNER))
    return Params(
        encoder=[layer(3, 3, 1, FEATURES[0]), layer(3, 3, *FEATURES)],
        posterior=[layer(size + digits.CLASSES, HIDDEN), layer(HIDDEN, 2 * latents)],
        corner=[layer(latents + digits.CLASSES, HIDDEN), layer(HIDDEN, size)],
        decoder=[layer(4, 4, *reversed(FEATURES)), layer(4, 4, FEATURES[0], 1)],
    )


def encode(
    params: Params, images: ArrayLike, labels: ArrayLike, implementation: str | None
) -> tuple[jax.Array, jax.Array]:
    """The means and log variances [N, Z] of the latent variables of images [N, 8, 8] with labels [N]."""
    x = jnp.asarray(images)[..., None]
    for w, b in params.encoder:
        settings = {"dimension_numbers": LAYOUT, "bias": b, "implementation": implementation}
        x = jax.nn.relu(jaxgrad.conv_general_dilated(x, w, (2, 2), "SAME", **settings))
    posterior = dense(params.posterior, x.reshape(len(x), -1), labels)
    mean, log_var = jnp.split(posterior, 2, axis=1)
    return mean, log_var


def decode(params: Params, z: jax.Array, labels: ArrayLike, implementation: str | None) -> jax.Array:
    """The logits [N, 8, 8] of a dot being set, for latent variables [N, Z] and labels [N]."""
    x = dense(params.corner, z, labels).reshape(-1, *CORNER)
    for w, b in params.decoder:
        settings = {"dimension_numbers": LAYOUT, "bias": b, "implementation": implementation}
        x = jaxgrad.conv_transpose(jax.nn.relu(x), w, (2, 2), "SAME", **settings)
    return x[..., 0]


def dense(layers: Sequence[Layer], x: jax.Array, labels: ArrayLike) -> jax.Array:
    """[N, outputs] of x [N, inputs] and labels [N], with relu between the layers."""
    x = jnp.concatenate([x, jax.nn.one_hot(labels, digits.CLASSES)], axis=1)
    for w, b in layers[:-1]:
        x = jax.nn.relu(x @ w + b)
    return x @ layers[-1].w + layers[-1].b


def elbo(params: Params, key: jax.Array, images: ArrayLike, labels: ArrayLike, implementation: str | None) -> jax.Array:
    """The evidence lower bounds [N] of images [N, 8, 8] with labels [N], in nats, each from one latent sample."""
    mean, log_var = encode(params, images, labels, implementation)
    z = mean + jnp.exp(log_var / 2) * jax.random.normal(key, mean.shape)
    logits = decode(params, z, labels, implementation)
    trials = digits.LEVELS
    dots = trials * jnp.asarray(images)
    arrangements = gammaln(trials + 1.0) - gammaln(dots + 1) - gammaln(trials - dots + 1)
    log_likelihood = arrangements + dots * logits - trials * jax.nn.softplus(logits)
    divergence = (mean**2 + jnp.exp(log_var) - log_var - 1) / 2
    return log_likelihood.sum((1, 2)) - divergence.sum(1)


def train(
    data: digits.Digits, args: argparse.Namespace, implementation: str | None
) -> tuple[Params, list[digits.Epoch]]:
    steps = args.epochs * digits.steps_per_epoch(data, args)
    optimizer = optax.adamw(optax.cosine_decay_schedule(args.learning_rate, steps), weight_decay=WEIGHT_DECAY)
    params_key, noise_key, test_key = jax.random.split(jax.random.key(args.seed), 3)

    def step(state: State, images: ArrayLike, labels: ArrayLike) -> tuple[State, jax.Array]:
        key, noise = jax.random.split(state.key)

        def loss_of(params: Params) -> jax.Array:
            return -elbo(params, noise, images, labels, implementation).mean()

        loss, gradients = jax.value_and_grad(loss_of)(state.params)
        updates, optimizer_state = optimizer.update(gradients, state.optimizer, state.params)
        return State(optax.apply_updates(state.params, updates), optimizer_state, key), loss

    def test(state: State) -> dict[str, jax.Array]:
        images, labels = (jnp.repeat(array, TEST_SAMPLES, axis=0) for array in (data.images_test, data.labels_test))
        return {"elbo": elbo(state.params, test_key, images, labels, implementation).mean()}

    params = initial_params(params_key, args.latents)
    state = State(params, optimizer.init(params), noise_key)
    state, history = digits.fit(step, state, data, test, args)
    return state.params, history


def save_picture(params: Params, data: digits.Digits, args: argparse.Namespace, implementation: str | None) -> None:
    """A column for each class: a test digit, its reconstruction, and digits from latents of N(0, 1)."""
    classes = np.arange(digits.CLASSES)
    originals = data.images_test[[np.argmax(data.labels_test == c) for c in classes]]
    rebuilt = decode(params, encode(params, originals, classes, implementation)[0], classes, implementation)
    z = jax.random.normal(jax.random.key(args.seed), (GENERATED * digits.CLASSES, args.latents))
    generated = decode(params, z, np.tile(classes, GENERATED), implementation)
    figure = Figure(figsize=(5, 5.8), layout="constrained")
    top, bottom = figure.subplots(2, 1, height_ratios=(2, GENERATED))
    _draw(top, np.concatenate([originals, jax.nn.sigmoid(rebuilt)]), "test digits, and their reconstructions")
    _draw(bottom, jax.nn.sigmoid(generated), "generated")
    figure.savefig(args.plot, dpi=150)


def _draw(axes: Any, images: ArrayLike, title: str) -> None:
    """Images [rows * 10, 8, 8], row by row, in a white frame of one pixel each."""
    framed = np.pad(images, ((0, 0), (1, 1), (1, 1)))
    rows = framed.reshape(-1, digits.CLASSES, *framed.shape[1:]).swapaxes(1, 2)
    axes.imshow(rows.reshape(-1, digits.CLASSES * framed.shape[2]), cmap="gray_r", vmin=0, vmax=1)
    axes.set_title(title, fontsize=10)
    axes.axis("off")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = digits.argument_parser(
        "Trains a variational autoencoder on scikit-learn's handwritten digits.",
        epochs=60,
        batch_size=32,
        learning_rate=2e-3,
        plot="train_digits_vae.png",
    )
    parser.add_argument(
        "--latents",
        type=training.positive_int,
        default=4,
        help="latent variables; more raise the ELBO, fewer make what is generated clearer",
    )
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    args = parse(arguments)
    implementation = digits.implementation(args, jaxgrad.conv_general_dilated, jaxgrad.conv_transpose)
    data = digits.load(args.seed)
    params, history = train(data, args, implementation)
    save_picture(params, data, args, implementation)
    print(f"test ELBO: {history[-1].test['elbo']:.2f} nats per digit ({len(data.images_test)} digits)")
    digits.print_step_time(history)
    print(f"reconstructed and generated digits: {args.plot}")


if __name__ == "__main__":
    main()
