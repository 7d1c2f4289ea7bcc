"""Code shared by the examples on handwritten digits: the data, the common arguments, the training loop and the curves.

The data are scikit-learn's 1797 digits of 8 x 8 pixels, which come with that package.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import training
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import ArrayLike
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from tqdm import tqdm

import jaxgrad

CLASSES, SIZE, LEVELS = 10, 8, 16  # a pixel is a whole number of sixteenths, from 0 to 1


class Digits(NamedTuple):
    """Images [N, 8, 8] of pixels in [0, 1], and labels [N], of both splits."""

    images_train: np.ndarray
    images_test: np.ndarray
    labels_train: np.ndarray
    labels_test: np.ndarray


class Epoch(NamedTuple):
    """Results of one epoch: the mean training loss, what the test returned, the seconds of a training step."""

    train_loss: float
    test: dict[str, float]
    step_seconds: float


def load(seed: int) -> Digits:
    """A fifth of the digits is held out for the test, every class in proportion."""
    pixels, labels = load_digits(return_X_y=True)
    images = (pixels.reshape(-1, SIZE, SIZE) / LEVELS).astype(np.float32)
    labels = labels.astype(np.int32)
    return Digits(*train_test_split(images, labels, test_size=0.2, stratify=labels, random_state=seed))


def fit(
    step: Callable[..., tuple[Any, jax.Array]],
    state: Any,
    data: Digits,
    test: Callable[[Any], Mapping[str, jax.Array]],
    args: argparse.Namespace,
    mesh: Mesh | None = None,
) -> tuple[Any, list[Epoch]]:
    """Trains on shuffled batches, with a progress bar, and tests after every epoch.

    Args:
      step: `step(state, images, labels)` of a batch, which returns the next state and the loss.
      state: the first state, any tree of arrays.
      data: the batches come from its training split.
      test: `test(state)`, which returns the numbers that belong to the test split.
      args: with `epochs`, `batch_size` and `seed`, the seed of the order.
      mesh: the devices that each batch is spread over, along its only axis; None for JAX's default device. Each
        process must call this alike.

    Returns:
      The last state, and one record for each epoch.
    """
    images, labels, shuffle = data.images_train, data.labels_train, np.random.default_rng(args.seed)
    used = steps_per_epoch(data, args) * args.batch_size  # digits in an epoch; the others are left out
    everywhere = None if mesh is None else NamedSharding(mesh, PartitionSpec())
    if mesh is not None:
        state = jax.jit(lambda: state, out_shardings=everywhere)()

    def batch_of(rows: np.ndarray) -> tuple[ArrayLike, ...]:
        arrays = images[rows], labels[rows]
        if mesh is None:
            return arrays
        spread = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
        return tuple(jax.make_array_from_callback(a.shape, spread, a.__getitem__) for a in arrays)

    # Compiled ahead, so that no epoch's time includes it.
    first = batch_of(np.arange(args.batch_size))
    compiled_step = jax.jit(step, out_shardings=everywhere).lower(state, *first).compile()
    compiled_test = jax.jit(test, out_shardings=everywhere).lower(state).compile()
    history = []
    for _ in (bar := tqdm(range(args.epochs), unit="epoch")):
        order = shuffle.permutation(len(images))[:used]
        losses, start = [], time.perf_counter()
        for batch in order.reshape(-1, args.batch_size):
            state, loss = compiled_step(state, *batch_of(batch))
            losses.append(loss)
        jax.block_until_ready(state)
        seconds = (time.perf_counter() - start) / len(losses)
        tested = {name: float(value) for name, value in compiled_test(state).items()}
        history.append(Epoch(float(np.mean(losses)), tested, seconds))
        bar.set_postfix(train_loss=history[-1].train_loss, **{f"test_{name}": value for name, value in tested.items()})
    return state, history


def steps_per_epoch(data: Digits, args: argparse.Namespace) -> int:
    count = len(data.images_train)
    if args.batch_size > count:
        raise SystemExit(f"argument --batch-size: must be at most the {count} digits, got {args.batch_size}")
    return count // args.batch_size


def print_accuracy(history: Sequence[Epoch], data: Digits) -> None:
    print(f"test accuracy: {history[-1].test['accuracy']:.2%} of {len(data.labels_test)} digits")


def print_step_time(history: Sequence[Epoch]) -> None:
    milliseconds = 1e3 * np.median([epoch.step_seconds for epoch in history])
    print(f"time per step: {milliseconds:.2f} ms (median over the epochs, compilation excluded)")


def frechet_distance(a: ArrayLike, b: ArrayLike) -> float:
    """Between the normal distributions with the means and covariances of the pixels of images a and b [N, 8, 8]."""
    a, b = (np.asarray(images, np.float64).reshape(len(images), -1) for images in (a, b))
    cov_a, cov_b = np.cov(a.T), np.cov(b.T)
    roots = np.sqrt(np.linalg.eigvals(cov_a @ cov_b).real.clip(0))
    return np.sum((a.mean(0) - b.mean(0)) ** 2) + np.trace(cov_a) + np.trace(cov_b) - 2 * roots.sum()


def save_curves(history: Sequence[Epoch], path: Path) -> None:
    """Plots the losses of both splits and the test accuracy; the tests must have returned "loss" and "accuracy"."""
    figure = Figure(figsize=(9, 3.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    epochs = range(1, len(history) + 1)
    left.plot(epochs, [e.train_loss for e in history], label="training")
    left.plot(epochs, [e.test["loss"] for e in history], label="test")
    left.set(xlabel="epoch", ylabel="loss (nats)", yscale="log")
    left.legend()
    right.plot(epochs, [100 * e.test["accuracy"] for e in history])
    right.set(xlabel="epoch", ylabel="test accuracy (%)")
    for axes in (left, right):
        axes.xaxis.get_major_locator().set_params(integer=True)
    figure.savefig(path, dpi=150)


# --- arguments ----------------------------------------------------------------------------------------------------


def argument_parser(
    description: str, *, epochs: int, batch_size: int, learning_rate: float, plot: str, ops: bool = True
) -> argparse.ArgumentParser:
    """A parser of the arguments that all the examples take, with these defaults; `ops` adds `--implementation`."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter, allow_abbrev=False
    )
    if ops:
        parser.add_argument("--implementation", choices=("auto", "xla"), default="auto", help="of jaxgrad's ops")
    parser.add_argument("--epochs", type=training.positive_int, default=epochs, help="passes over the training split")
    parser.add_argument("--batch-size", type=training.positive_int, default=batch_size, help="digits in a step")
    parser.add_argument(
        "--learning-rate",
        type=training.positive_float,
        default=learning_rate,
        help="AdamW's highest, from where a cosine falls",
    )
    parser.add_argument(
        "--seed", type=training.seed, default=0, help="of the split, the weights and the order of the digits"
    )
    parser.add_argument("--plot", type=training.png, default=Path(plot), help="the picture that is saved")
    return parser


def implementation(args: argparse.Namespace, *ops: Callable[..., Any]) -> str | None:
    """`--implementation` as jaxgrad takes it; prints the implementation that it selects for each of `ops`."""
    found = None if args.implementation == "auto" else args.implementation
    for op in ops:
        print(jaxgrad.explain(op, implementation=found))
    return found
