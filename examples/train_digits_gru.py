"""Trains a GRU to read handwritten digits, one row of pixels at a time.

The data are scikit-learn's 1797 digits of 8 x 8 pixels, which come with that package: a digit is a sequence of T = 8
steps of I = 8 inputs. The GRU's last state goes through a linear layer to the ten classes.

  pip install ".[examples]"
  python examples/train_digits_gru.py --direction bidirectional
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any, NamedTuple

import digits
import jax
import jax.numpy as jnp
import optax
import training
from jax.typing import ArrayLike

import jaxgrad


class Params(NamedTuple):
    """With H hidden units in each of D directions."""

    w: jax.Array  # [D, 3H, 8], the GRU's input weights, gates in the order z, r, n
    r: jax.Array  # [D, 3H, H], its recurrent weights
    b: jax.Array  # [D, 6H], its biases
    head_w: jax.Array  # [D * H, 10]
    head_b: jax.Array  # [10]


class State(NamedTuple):
    """All that a training step takes and returns."""

    params: Params
    optimizer: Any


def initial_params(key: jax.Array, hidden: int, directions: int) -> Params:
    """Uniform within 1 / sqrt(H), as PyTorch draws them."""
    bound = hidden**-0.5
    shapes = {
        "w": (directions, 3 * hidden, digits.SIZE),
        "r": (directions, 3 * hidden, hidden),
        "b": (directions, 6 * hidden),
        "head_w": (directions * hidden, digits.CLASSES),
        "head_b": (digits.CLASSES,),
    }
    keys = jax.random.split(key, len(shapes))
    drawn = (jax.random.uniform(k, s, minval=-bound, maxval=bound) for k, s in zip(keys, shapes.values(), strict=True))
    return Params(**dict(zip(shapes, drawn, strict=True)))


def evaluate(
    params: Params, images: ArrayLike, labels: ArrayLike, settings: dict[str, Any]
) -> tuple[jax.Array, jax.Array]:
    """The mean loss and the accuracy on images [N, 8, 8]; `settings` are keyword arguments of `jaxgrad.gru`."""
    _, last = jaxgrad.gru(jnp.swapaxes(images, 0, 1), params.w, params.r, params.b, **settings)
    scores = last.swapaxes(0, 1).reshape(last.shape[1], -1) @ params.head_w + params.head_b
    losses = optax.softmax_cross_entropy_with_integer_labels(scores, labels)
    return losses.mean(), (scores.argmax(1) == labels).mean()


def train(data: digits.Digits, args: argparse.Namespace, settings: dict[str, Any]) -> list[digits.Epoch]:
    steps = args.epochs * digits.steps_per_epoch(data, args)
    optimizer = optax.adamw(optax.cosine_decay_schedule(args.learning_rate, steps))

    def step(state: State, images: ArrayLike, labels: ArrayLike) -> tuple[State, jax.Array]:
        loss, gradients = jax.value_and_grad(lambda p: evaluate(p, images, labels, settings)[0])(state.params)
        updates, optimizer_state = optimizer.update(gradients, state.optimizer, state.params)
        return State(optax.apply_updates(state.params, updates), optimizer_state), loss

    def test(state: State) -> dict[str, jax.Array]:
        loss, accuracy = evaluate(state.params, data.images_test, data.labels_test, settings)
        return {"loss": loss, "accuracy": accuracy}

    params = initial_params(jax.random.key(args.seed), args.hidden, 2 if args.direction == "bidirectional" else 1)
    return digits.fit(step, State(params, optimizer.init(params)), data, test, args)[1]


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = digits.argument_parser(
        "Trains a GRU to read scikit-learn's handwritten digits.",
        epochs=40,
        batch_size=32,
        learning_rate=1e-2,
        plot="train_digits_gru.png",
    )
    parser.add_argument("--direction", choices=("forward", "reverse", "bidirectional"), default="forward")
    parser.add_argument("--linear-before-reset", action="store_true", help="the reset gate as in cuDNN and PyTorch")
    parser.add_argument("--hidden", type=training.positive_int, default=128, help="units in each direction")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    args = parse(arguments)
    settings = {
        "direction": args.direction,
        "linear_before_reset": args.linear_before_reset,
        "implementation": digits.implementation(args, jaxgrad.gru),
    }
    data = digits.load(args.seed)
    history = train(data, args, settings)
    digits.save_curves(history, args.plot)
    digits.print_accuracy(history, data)
    digits.print_step_time(history)
    print(f"curves: {args.plot}")


if __name__ == "__main__":
    main()
