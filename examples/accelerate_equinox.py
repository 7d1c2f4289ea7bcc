"""Trains a convolutional autoencoder of equinox on handwritten digits, without and with `jaxgrad.accelerate`.

The model and the training step are plain equinox: layers `Conv2d` and `ConvTranspose2d` for one image, `jax.vmap` over
the batch, `filter_value_and_grad` and `filter_jit`. The only change is `jaxgrad.accelerate(train_step)`.

  pip install ".[examples]"
  python examples/accelerate_equinox.py
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any

import comparing
import digits
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxgrad

# --- the model and its training step: plain equinox ----------------------------------------------------------------


class Autoencoder(eqx.Module):
    encoder: eqx.nn.Sequential
    decoder: eqx.nn.Sequential

    def __init__(self, features: int, code: int, key: jax.Array):
        keys = jax.random.split(key, 6)
        relu = eqx.nn.Lambda(jax.nn.relu)
        self.encoder = eqx.nn.Sequential(
            [
                eqx.nn.Conv2d(1, features, 3, padding=1, key=keys[0]),
                relu,
                eqx.nn.Conv2d(features, 2 * features, 4, stride=2, padding=1, key=keys[1]),
                relu,
                eqx.nn.Conv2d(2 * features, code, 4, stride=2, padding=1, key=keys[2]),
            ]
        )
        self.decoder = eqx.nn.Sequential(
            [
                eqx.nn.ConvTranspose2d(code, 2 * features, 4, stride=2, padding=1, key=keys[3]),
                relu,
                eqx.nn.ConvTranspose2d(2 * features, features, 4, stride=2, padding=1, key=keys[4]),
                relu,
                eqx.nn.Conv2d(features, 1, 3, padding=1, key=keys[5]),
            ]
        )

    def __call__(self, image: jax.Array) -> jax.Array:
        return self.decoder(self.encoder(image[None]))[0]


def loss_fn(model: Autoencoder, images: jax.Array) -> jax.Array:
    return jnp.square(jax.vmap(model)(images) - images).mean()


@eqx.filter_jit
def train_step(
    model: Autoencoder, state: optax.OptState, optimizer: optax.GradientTransformation, images: jax.Array
) -> tuple[Autoencoder, optax.OptState, jax.Array]:
    loss, gradients = eqx.filter_value_and_grad(loss_fn)(model, images)
    updates, state = optimizer.update(gradients, state, eqx.filter(model, eqx.is_inexact_array))
    return eqx.apply_updates(model, updates), state, loss


# --- training, without and with jaxgrad.accelerate ------------------------------------------------------------------


def train(train_step: Callable[..., Any], data: digits.Digits, args: argparse.Namespace) -> comparing.Run:
    model = Autoencoder(32, 4, jax.random.key(args.seed))
    steps = args.epochs * digits.steps_per_epoch(data, args)
    optimizer = optax.adamw(optax.cosine_decay_schedule(args.learning_rate, steps), weight_decay=1e-4)

    def step(state: tuple[Autoencoder, Any, Any], images: np.ndarray, labels: np.ndarray) -> tuple[Any, jax.Array]:
        model, optimizer_state, loss = train_step(*state, images)
        return (model, optimizer_state, optimizer), loss

    def test(state: tuple[Autoencoder, Any, Any]) -> dict[str, jax.Array]:
        return {"rmse": jnp.sqrt(eqx.filter_jit(loss_fn)(state[0], data.images_test))}

    state = model, optimizer.init(eqx.filter(model, eqx.is_inexact_array)), optimizer
    return comparing.fit(step, state, data, test, args)


def main(arguments: Sequence[str] | None = None) -> None:
    args = digits.argument_parser(
        "Trains an autoencoder of equinox on scikit-learn's digits, without and with jaxgrad.accelerate.",
        epochs=20,
        batch_size=64,
        learning_rate=2e-3,
        plot="accelerate_equinox.png",
        ops=False,
    ).parse_args(arguments)
    data = digits.load(args.seed)
    run = comparing.both_ways(train, train_step, data, args)
    batch = data.images_train[: args.batch_size]
    print(jaxgrad.report(jaxgrad.accelerate(train_step), *run.state, batch))
    originals = data.images_test[:10]
    rows = {"test digits": originals, "reconstructions": jax.vmap(run.state[0])(originals)}
    comparing.save_images(rows, args.plot)
    print(f"test error: {run.epochs[-1].test['rmse']:.3f} (root mean square of pixels in [0, 1])")
    print(f"reconstructed digits: {args.plot}")


if __name__ == "__main__":
    main()
