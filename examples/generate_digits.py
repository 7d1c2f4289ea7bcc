"""Trains a DCGAN to draw handwritten digits, on the ops of jaxgrad and on those of JAX.

The data are scikit-learn's 1797 digits of 8 x 8 pixels, which come with that package. The networks are those of Radford
et al., "Unsupervised Representation Learning with Deep Convolutional Generative Adversarial Networks" (2015), with two
layers each. The printed Frechet distance falls as the means and covariances of the generated pixels approach those of
the test digits.

  pip install ".[examples]"
  python examples/generate_digits.py
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import digits
import jax
import jax.numpy as jnp
import numpy as np
import optax
import training
from jax import lax
from jax.typing import ArrayLike
from matplotlib.figure import Figure

import jaxgrad

LATENTS = 32  # inputs of the generator
FEATURES = (32, 64)  # of the layers at 4 x 4 and at 2 x 2 pixels


class Params(NamedTuple):
    """Of the generator or the discriminator; the generator uses the layers from the last one to the first."""

    dense: jax.Array  # [LATENTS, 2 * 2 * 64] or [1, 2 * 2 * 64]
    norms: list[tuple[jax.Array, jax.Array]]  # scale and bias [32], then [64]
    convs: list[jax.Array]  # [4, 4, 1, 32], then [4, 4, 32, 64]


class Ops(NamedTuple):
    """The operations of the networks."""

    conv: Callable[..., jax.Array]
    conv_transpose: Callable[..., jax.Array]
    batch_norm_relu: Callable[..., jax.Array]


def batch_norm_relu(x: jax.Array, scale: jax.Array, bias: jax.Array) -> jax.Array:
    return jax.nn.relu(jax.nn.standardize(x, axis=(0, 1, 2)) * scale + bias)


JAX = Ops(lax.conv_general_dilated, lax.conv_transpose, batch_norm_relu)
JAXGRAD = Ops(
    jaxgrad.conv_general_dilated,
    jaxgrad.conv_transpose,
    lambda x, scale, bias: jaxgrad.batch_norm_training(x, scale, bias, activation="relu")[0],
)


def generate(ops: Ops, params: Params, latents: ArrayLike) -> jax.Array:
    """Images [N, 8, 8] with pixels in [0, 1], of latents [N, LATENTS]."""
    x = (latents @ params.dense).reshape(-1, 2, 2, FEATURES[1])
    for norm, w in zip(reversed(params.norms), reversed(params.convs), strict=True):
        x = ops.batch_norm_relu(x, *norm)
        x = ops.conv_transpose(x, w, (2, 2), "SAME", dimension_numbers=("NHWC", "HWOI", "NHWC"))
    return jax.nn.sigmoid(x[..., 0])


def discriminate(ops: Ops, params: Params, images: ArrayLike) -> jax.Array:
    """The logits [N] of images [N, 8, 8] being real."""
    x = jnp.asarray(images)[..., None]
    for norm, w in zip(params.norms, params.convs, strict=True):
        x = ops.conv(x, w, (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        x = ops.batch_norm_relu(x, *norm)
    return x.reshape(len(x), -1) @ params.dense[0]


def initial(key: jax.Array, dense: tuple[int, ...]) -> Params:
    keys = jax.random.split(key, 1 + len(FEATURES))
    shapes = [dense, *((4, 4, i, o) for i, o in zip((1, *FEATURES), FEATURES, strict=False))]
    dense, *convs = (0.05 * jax.random.normal(k, shape) for k, shape in zip(keys, shapes, strict=True))
    return Params(dense, [(jnp.ones(n), jnp.zeros(n)) for n in FEATURES], convs)


def training_step(ops: Ops, optimizer: optax.GradientTransformation) -> training.Step:
    def step(state: training.State, images: ArrayLike, latents: ArrayLike) -> tuple[Any, dict[str, jax.Array]]:
        generator, discriminator = state.params  # each takes a step against the other one as it was

        def generator_loss(params: Params) -> jax.Array:
            return jax.nn.softplus(-discriminate(ops, discriminator, generate(ops, params, latents))).mean()

        def discriminator_loss(params: Params) -> jax.Array:
            real, fake = (discriminate(ops, params, x) for x in (images, generate(ops, generator, latents)))
            return (jax.nn.softplus(-real) + jax.nn.softplus(fake)).mean() / 2

        g_loss, g_gradients = jax.value_and_grad(generator_loss)(generator)
        d_loss, d_gradients = jax.value_and_grad(discriminator_loss)(discriminator)
        state = training.updated(state, (g_gradients, d_gradients), optimizer)
        return state, {"generator": g_loss, "discriminator": d_loss}

    return step


def main(arguments: Sequence[str] | None = None) -> None:
    description = "Trains a DCGAN to draw handwritten digits, on the ops of jaxgrad and on those of JAX."
    args = training.argument_parser(
        description, steps=2000, learning_rate=5e-4, batch_size=64, plot="generate_digits.png"
    ).parse_args(arguments)
    data = digits.load(args.seed)
    optimizer = optax.adam(args.learning_rate, b1=0.5)
    keys, size = jax.random.split(jax.random.key(args.seed)), 2 * 2 * FEATURES[1]
    players = initial(keys[0], (LATENTS, size)), initial(keys[1], (1, size))

    def batch(rng: np.random.Generator, count: int = args.batch_size) -> tuple[np.ndarray, np.ndarray]:
        return rng.choice(data.images_train, count), rng.standard_normal((count, LATENTS), np.float32)

    def drawn(params: Params) -> jax.Array:
        _, latents = batch(np.random.default_rng(args.seed), 1000)
        return generate(JAXGRAD, params, latents)  # normalized by the statistics of this batch

    without, with_jaxgrad = (training_step(ops, optimizer) for ops in (JAX, JAXGRAD))
    state, history = training.fit(with_jaxgrad, training.State(players, optimizer.init(players)), batch, args)
    images = {"test digits": data.images_test, "generated": drawn(state.params[0])}
    print(
        f"Frechet distance to the test digits: {digits.frechet_distance(*images.values()):.3f}, "
        f"before training {digits.frechet_distance(data.images_test, drawn(players[0])):.3f}, "
        f"of the training digits {digits.frechet_distance(data.images_test, data.images_train):.3f}"
    )
    training.print_step_times(without, with_jaxgrad, state, *batch(np.random.default_rng(args.seed)))
    save_picture(images, history, args.plot)
    print(f"test digits, generated ones and the losses: {args.plot}")


def save_picture(images: dict[str, ArrayLike], history: dict[str, np.ndarray], path: Path) -> None:
    """Draws 8 x 8 images of each kind, and the losses."""
    figure = Figure(figsize=(12, 4), layout="constrained")
    *grids, curves = figure.subplots(1, len(images) + 1)
    for axes, (title, pixels) in zip(grids, images.items(), strict=True):
        framed = np.pad(pixels[:64], ((0, 0), (1, 1), (1, 1))).reshape(8, 8, 10, 10)
        training.show_image(axes, framed.swapaxes(1, 2).reshape(80, 80), title, "gray_r")
    training.draw_curves(curves, history, "loss (nats)")
    figure.savefig(path, dpi=100)


if __name__ == "__main__":
    main()
