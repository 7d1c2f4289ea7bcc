"""Trains a GRU to read handwritten digits, one row of pixels at a time.

The data are scikit-learn's 1797 digits of 8 x 8 pixels, which come with that package: a digit is a sequence of T = 8
steps of I = 8 inputs. The GRU's last state goes through a linear layer to the ten classes.

  pip install "jaxgrad[examples]"
  python examples/train_digits_gru.py --direction bidirectional
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import ArrayLike
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from tqdm import tqdm

import jaxgrad

CLASSES, ROWS, PIXELS = 10, 8, 8


class Digits(NamedTuple):
    """Sequences [N, 8, 8] of pixels in [0, 1], and labels [N], of both splits."""

    x_train: np.ndarray
    x_test: np.ndarray
    labels_train: np.ndarray
    labels_test: np.ndarray


class Params(NamedTuple):
    """With H hidden units in each of D directions."""

    w: jax.Array  # [D, 3H, 8], the GRU's input weights, gates in the order z, r, h
    r: jax.Array  # [D, 3H, H], its recurrent weights
    b: jax.Array  # [D, 6H], its biases
    head_w: jax.Array  # [D * H, 10]
    head_b: jax.Array  # [10]


class Epoch(NamedTuple):
    """What one epoch came to: mean losses in nats, the test accuracy from 0 to 1, the seconds of a training step."""

    train_loss: float
    test_loss: float
    test_accuracy: float
    step_seconds: float


def load(seed: int) -> Digits:
    """A fifth of the digits is held out for the test, every class in proportion."""
    images, labels = load_digits(return_X_y=True)
    x = (images.reshape(-1, ROWS, PIXELS) / 16).astype(np.float32)
    return Digits(*train_test_split(x, labels.astype(np.int32), test_size=0.2, stratify=labels, random_state=seed))


def initial_params(key: jax.Array, hidden: int, directions: int) -> Params:
    """Uniform within 1 / sqrt(H), as PyTorch draws them."""
    bound = hidden**-0.5
    shapes = {
        "w": (directions, 3 * hidden, PIXELS),
        "r": (directions, 3 * hidden, hidden),
        "b": (directions, 6 * hidden),
        "head_w": (directions * hidden, CLASSES),
        "head_b": (CLASSES,),
    }
    keys = jax.random.split(key, len(shapes))
    drawn = (jax.random.uniform(k, s, minval=-bound, maxval=bound) for k, s in zip(keys, shapes.values(), strict=True))
    return Params(**dict(zip(shapes, drawn, strict=True)))


def evaluate(params: Params, x: ArrayLike, labels: ArrayLike, settings: dict[str, Any]) -> tuple[jax.Array, jax.Array]:
    """The mean loss and the accuracy on sequences [N, 8, 8]; `settings` are keyword arguments of `jaxgrad.gru`."""
    _, last = jaxgrad.gru(jnp.swapaxes(x, 0, 1), params.w, params.r, params.b, **settings)
    scores = last.swapaxes(0, 1).reshape(last.shape[1], -1) @ params.head_w + params.head_b
    losses = optax.softmax_cross_entropy_with_integer_labels(scores, labels)
    return losses.mean(), (scores.argmax(1) == labels).mean()


def train(digits: Digits, args: argparse.Namespace, settings: dict[str, Any]) -> list[Epoch]:
    steps = len(digits.x_train) // args.batch_size  # in an epoch; the digits left over sit it out
    optimizer = optax.adamw(optax.cosine_decay_schedule(args.learning_rate, steps * args.epochs))
    params = initial_params(jax.random.key(args.seed), args.hidden, 2 if args.direction == "bidirectional" else 1)
    state = optimizer.init(params)
    test = jax.jit(lambda params: evaluate(params, digits.x_test, digits.labels_test, settings))

    @jax.jit
    def train_step(params: Params, state: Any, x: ArrayLike, labels: ArrayLike) -> tuple[Params, Any, jax.Array]:
        loss, gradients = jax.value_and_grad(lambda p: evaluate(p, x, labels, settings)[0])(params)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, loss

    # Compiled ahead, so that no epoch's time includes it.
    first = slice(args.batch_size)
    compiled_step = train_step.lower(params, state, digits.x_train[first], digits.labels_train[first]).compile()
    history, shuffle = [], np.random.default_rng(args.seed)
    for _ in (bar := tqdm(range(args.epochs), unit="epoch")):
        order = shuffle.permutation(len(digits.x_train))[: steps * args.batch_size].reshape(steps, -1)
        losses, start = [], time.perf_counter()
        for batch in order:
            params, state, loss = compiled_step(params, state, digits.x_train[batch], digits.labels_train[batch])
            losses.append(loss)
        jax.block_until_ready(params)
        seconds = (time.perf_counter() - start) / steps
        test_loss, test_accuracy = test(params)
        history.append(Epoch(float(np.mean(losses)), float(test_loss), float(test_accuracy), seconds))
        bar.set_postfix(loss=f"{history[-1].train_loss:.3f}", test_accuracy=f"{test_accuracy:.1%}")
    return history


def save_curves(history: list[Epoch], path: Path) -> None:
    figure = Figure(figsize=(9, 3.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    epochs = range(1, len(history) + 1)
    left.plot(epochs, [e.train_loss for e in history], label="training")
    left.plot(epochs, [e.test_loss for e in history], label="test")
    left.set(xlabel="epoch", ylabel="loss (nats)", yscale="log")
    left.legend()
    right.plot(epochs, [100 * e.test_accuracy for e in history])
    right.set(xlabel="epoch", ylabel="test accuracy (%)")
    for axes in (left, right):
        axes.xaxis.get_major_locator().set_params(integer=True)
    figure.savefig(path, dpi=150)


def positive_int(text: str) -> int:
    if int(text) <= 0:
        raise argparse.ArgumentTypeError(f"must be positive, got {text}")
    return int(text)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Trains a GRU to read scikit-learn's handwritten digits.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--implementation", choices=("auto", "cpu", "xla"), default="auto", help="of jaxgrad.gru")
    parser.add_argument("--direction", choices=("forward", "reverse", "bidirectional"), default="forward")
    parser.add_argument("--linear-before-reset", action="store_true", help="the reset gate as in cuDNN and PyTorch")
    parser.add_argument("--hidden", type=positive_int, default=128, help="units in each direction")
    parser.add_argument("--epochs", type=positive_int, default=40, help="passes over the training split")
    parser.add_argument("--batch-size", type=positive_int, default=32, help="digits in a step")
    parser.add_argument("--learning-rate", type=float, default=1e-2, help="AdamW's at the first step, then a cosine")
    parser.add_argument("--seed", type=int, default=0, help="of the split, the weights and the order of the digits")
    parser.add_argument("--plot", type=Path, default=Path("train_digits_gru.png"), help="where the curves go")
    args = parser.parse_args(arguments)
    if not 0 < args.learning_rate < float("inf"):
        parser.error(f"argument --learning-rate: must be positive, got {args.learning_rate}")
    if not 0 <= args.seed < 2**32:
        parser.error(f"argument --seed: must lie in [0, 2**32), got {args.seed}")
    if args.plot.suffix != ".png" or not args.plot.parent.is_dir():
        parser.error(f"argument --plot: must be a .png file in a folder that exists, got {args.plot}")
    return args


def main(arguments: Sequence[str] | None = None) -> None:
    args = parse(arguments)
    settings = {
        "direction": args.direction,
        "linear_before_reset": args.linear_before_reset,
        "implementation": None if args.implementation == "auto" else args.implementation,
    }
    digits = load(args.seed)
    if args.batch_size > len(digits.x_train):
        raise SystemExit(f"--batch-size: must be at most the {len(digits.x_train)} digits, got {args.batch_size}")
    try:
        print(jaxgrad.explain(jaxgrad.gru, **settings))
    except (RuntimeError, ValueError) as error:  # the forced implementation cannot run here
        raise SystemExit(f"--implementation: {error}") from None
    history = train(digits, args, settings)
    save_curves(history, args.plot)
    milliseconds = 1e3 * np.median([epoch.step_seconds for epoch in history])
    print(f"test accuracy: {history[-1].test_accuracy:.2%} of {len(digits.x_test)} digits")
    print(f"time per step: {milliseconds:.2f} ms (median over the epochs, compilation excluded)")
    print(f"curves: {args.plot}")


if __name__ == "__main__":
    main()
