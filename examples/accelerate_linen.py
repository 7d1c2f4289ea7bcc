"""Trains a U-Net of flax.linen to remove noise from handwritten digits, without and with `jaxgrad.accelerate`.

The model and the training step are plain flax: a U-Net (Ronneberger et al., "U-Net: Convolutional Networks for
Biomedical Image Segmentation", 2015) with transposed convolutions in its decoder, `TrainState` and `jax.jit`. The only
change is `jaxgrad.accelerate(train_step)`.

  pip install ".[examples]"
  python examples/accelerate_linen.py
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence

import comparing
import digits
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState

import jaxgrad

NOISE = 0.3  # standard deviation of the noise on pixels in [0, 1]

# --- the model and its training step: plain flax -------------------------------------------------------------------


class DoubleConv(nn.Module):
    features: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for _ in range(2):
            x = nn.relu(nn.Conv(self.features, (3, 3))(x))
        return x


class UNet(nn.Module):
    features: Sequence[int]  # of the levels; each has half the height and width of the level above it

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        x, skips = images[..., None], []
        *above, bottom = self.features
        for count in above:
            x = DoubleConv(count)(x)
            skips.append(x)
            x = nn.max_pool(x, (2, 2), (2, 2))
        x = DoubleConv(bottom)(x)
        for count in reversed(above):
            x = nn.ConvTranspose(count, (2, 2), (2, 2))(x)
            x = DoubleConv(count)(jnp.concatenate([skips.pop(), x], axis=-1))
        return nn.Conv(1, (1, 1))(x)[..., 0]


@jax.jit
def train_step(state: TrainState, noisy: jax.Array, clean: jax.Array) -> tuple[TrainState, jax.Array]:
    def loss_fn(params):
        return jnp.square(state.apply_fn({"params": params}, noisy) - clean).mean()

    loss, gradients = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=gradients), loss


# --- training, without and with jaxgrad.accelerate ------------------------------------------------------------------


def created(data: digits.Digits, args: argparse.Namespace) -> TrainState:
    model = UNet((32, 64, 128))
    params = model.init(jax.random.key(args.seed), data.images_train[:1])["params"]
    steps = args.epochs * digits.steps_per_epoch(data, args)
    schedule = optax.cosine_decay_schedule(args.learning_rate, steps)
    return TrainState.create(apply_fn=model.apply, params=params, tx=optax.adamw(schedule, weight_decay=1e-2))


def train(
    train_step: Callable[..., tuple[TrainState, jax.Array]], data: digits.Digits, args: argparse.Namespace
) -> comparing.Run:
    noise = np.random.default_rng(args.seed)
    noisy_test = with_noise(np.random.default_rng(args.seed), data.images_test)

    def step(state: TrainState, images: np.ndarray, labels: np.ndarray) -> tuple[TrainState, jax.Array]:
        return train_step(state, with_noise(noise, images), images)

    def test(state: TrainState) -> dict[str, jax.Array]:
        return {"rmse": jnp.sqrt(jnp.square(denoised(state, noisy_test) - data.images_test).mean())}

    return comparing.fit(step, created(data, args), data, test, args)


def denoised(state: TrainState, noisy: np.ndarray) -> jax.Array:
    return jax.jit(state.apply_fn)({"params": state.params}, noisy)


def with_noise(rng: np.random.Generator, images: np.ndarray) -> np.ndarray:
    return images + NOISE * rng.standard_normal(images.shape, np.float32)


def main(arguments: Sequence[str] | None = None) -> None:
    args = digits.argument_parser(
        "Trains a U-Net of flax.linen to denoise scikit-learn's digits, without and with jaxgrad.accelerate.",
        epochs=20,
        batch_size=64,
        learning_rate=2e-3,
        plot="accelerate_linen.png",
        ops=False,
    ).parse_args(arguments)
    data = digits.load(args.seed)
    run = comparing.both_ways(train, train_step, data, args)
    batch = data.images_train[: args.batch_size]
    print(jaxgrad.report(jaxgrad.accelerate(train_step), run.state, batch, batch))
    clean = data.images_test[:10]
    noisy = with_noise(np.random.default_rng(args.seed), clean)
    rows = {"test digits": clean, "with noise": noisy, "denoised": denoised(run.state, noisy)}
    comparing.save_images(rows, args.plot)
    print(f"test error: {run.epochs[-1].test['rmse']:.3f} (root mean square; noise {NOISE})")
    print(f"noisy and denoised digits: {args.plot}")


if __name__ == "__main__":
    main()
