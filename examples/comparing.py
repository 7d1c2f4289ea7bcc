"""Code shared by the accelerate examples: trains a model without and with `jaxgrad.accelerate`, and compares."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import digits
import numpy as np
from jax.typing import ArrayLike
from matplotlib.figure import Figure
from tqdm import tqdm

import jaxgrad

STEPS = 8  # that are trained both ways: more steps would differ more, as rounding errors grow

Train = Callable[[Callable[..., Any], digits.Digits, argparse.Namespace], "Run"]


class Run(NamedTuple):
    """A training: the last state, its epochs, and the loss and the seconds of every step."""

    state: Any
    epochs: list[digits.Epoch]
    losses: list[float]
    seconds: list[float]


def both_ways(train: Train, train_step: Callable[..., Any], data: digits.Digits, args: argparse.Namespace) -> Run:
    """Trains a few steps without and with `jaxgrad.accelerate` and compares; then trains accelerated, and returns that.

    Args:
      train: `train(train_step, data, args)`.
      train_step: the training step of the framework.
      data, args: as in `fit`.
    """
    used = STEPS * args.batch_size
    few = data._replace(images_train=data.images_train[:used], labels_train=data.labels_train[:used])
    one_epoch = argparse.Namespace(**{**vars(args), "epochs": 1})
    accelerated_step = jaxgrad.accelerate(train_step)
    plain, accelerated = (train(step, few, one_epoch) for step in (train_step, accelerated_step))
    run = train(accelerated_step, data, args)
    for name, seconds in (("without", plain.seconds), ("with", run.seconds)):
        print(f"time per step {name} jaxgrad.accelerate: {1e3 * np.median(seconds):.2f} ms (median)")
    difference = max(abs(a / b - 1) for a, b in zip(accelerated.losses, plain.losses, strict=True))
    print(f"the losses of the first {len(plain.losses)} steps differ by at most {difference:.0e} of their value")
    return run


def fit(
    step: Callable[[Any, np.ndarray, np.ndarray], tuple[Any, ArrayLike]],
    state: Any,
    data: digits.Digits,
    test: Callable[[Any], Mapping[str, ArrayLike]],
    args: argparse.Namespace,
) -> Run:
    """Trains on shuffled batches, with a progress bar, and tests after every epoch.

    Like `digits.fit`, but `step` and `test` are called as they are: the framework's own `jit` is inside.
    """
    images, labels, shuffle = data.images_train, data.labels_train, np.random.default_rng(args.seed)
    steps = digits.steps_per_epoch(data, args)
    epochs, losses, seconds = [], [], []
    for _ in (bar := tqdm(range(args.epochs), unit="epoch")):
        for rows in shuffle.permutation(len(images))[: steps * args.batch_size].reshape(steps, -1):
            start = time.perf_counter()
            state, loss = step(state, images[rows], labels[rows])
            losses.append(float(loss))
            seconds.append(time.perf_counter() - start)
        tested = {name: float(value) for name, value in test(state).items()}
        epochs.append(digits.Epoch(float(np.mean(losses[-steps:])), tested, float(np.median(seconds[-steps:]))))
        bar.set_postfix(train_loss=epochs[-1].train_loss, **{f"test_{name}": value for name, value in tested.items()})
    return Run(state, epochs, losses, seconds)


def save_images(rows: Mapping[str, ArrayLike], path: Path) -> None:
    """Draws rows of images [N, 8, 8] below each other, with their titles."""
    figure = Figure(figsize=(6, 1.1 * len(rows)), layout="constrained")
    for axes, (title, images) in zip(np.ravel(figure.subplots(len(rows), 1)), rows.items(), strict=True):
        framed = np.pad(np.asarray(images), ((0, 0), (1, 1), (1, 1)))
        axes.imshow(np.concatenate(list(framed), axis=1), cmap="gray_r", vmin=0, vmax=1)
        axes.set_title(title, fontsize=10)
        axes.axis("off")
    figure.savefig(path, dpi=150)
