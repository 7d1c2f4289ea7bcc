"""Code shared by training scripts: the training loop, the time of a step with and without jaxgrad, the arguments.

A training step is a function `step(state, *batch)`. It returns the next state, and its metrics: a dict of scalars.
"""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from jax.typing import ArrayLike
from matplotlib.axes import Axes
from tqdm import tqdm

SECONDS = 3.0  # that `step_times` measures for

Step = Callable[..., tuple[Any, Mapping[str, jax.Array]]]


class State(NamedTuple):
    """Parameters, and the state of their optimizer."""

    params: Any
    optimizer: Any


# --- training -----------------------------------------------------------------------------------------------------


def updated(state: State, gradients: Any, optimizer: optax.GradientTransformation) -> State:
    """The state after one step of the optimizer."""
    updates, optimizer_state = optimizer.update(gradients, state.optimizer, state.params)
    return State(optax.apply_updates(state.params, updates), optimizer_state)


def gradient_step(loss_of: Callable[..., jax.Array], optimizer: optax.GradientTransformation) -> Step:
    """The training step that lowers `loss_of(params, *batch)`. Its state is a `State`, its metric the loss."""

    def step(state: State, *batch: ArrayLike) -> tuple[State, dict[str, jax.Array]]:
        loss, gradients = jax.value_and_grad(loss_of)(state.params, *batch)
        return updated(state, gradients, optimizer), {"loss": loss}

    return step


def fit(
    step: Step, state: Any, draw: Callable[[np.random.Generator], tuple[ArrayLike, ...]], args: argparse.Namespace
) -> tuple[Any, dict[str, np.ndarray]]:
    """Trains for `args.steps` steps, with a progress bar.

    Args:
      step: the training step; it is compiled here.
      state: the first state, any tree of arrays.
      draw: `draw(rng)` returns the arrays of one batch, an empty tuple where the step takes none.
      args: with `steps`, and `seed`, the seed of `rng`.

    Returns:
      The last state, and the metrics of all steps: an array [steps] for each name.
    """
    rng, history = np.random.default_rng(args.seed), []
    compiled = jax.jit(step)
    for number in (bar := tqdm(range(args.steps), unit="step")):
        state, metrics = compiled(state, *draw(rng))
        history.append(metrics)
        if number % 10 == 0 or number == args.steps - 1:  # reading the metrics waits for the step
            bar.set_postfix({name: f"{float(value):.4g}" for name, value in metrics.items()})
    return state, jax.tree.map(lambda *values: np.array(values), *jax.device_get(history))


def draw_curves(axes: Axes, history: Mapping[str, np.ndarray], ylabel: str) -> None:
    """Draws the metrics over the steps, each as its mean over a fiftieth of the training."""
    for name, values in history.items():
        parts = np.array_split(values, min(50, len(values)))
        ends = np.cumsum([len(part) for part in parts])
        axes.plot(ends, [part.mean() for part in parts], label=name)
    axes.set(xlabel="step", ylabel=ylabel)
    axes.legend()


def show_image(axes: Axes, pixels: ArrayLike, title: str, cmap: str = "gray") -> None:
    axes.imshow(pixels, cmap=cmap)
    axes.set_title(title)
    axes.axis("off")


# --- the time of a step -------------------------------------------------------------------------------------------


def step_times(steps: Mapping[str, Step], state: Any, *batch: ArrayLike) -> dict[str, float]:
    """Measures training steps that do the same work.

    The first call of each compiles it, and is not counted. Then the steps are called in turns, always with the same
    arguments, for about `SECONDS`, and at least three times each.

    Returns:
      The median time of a call in seconds, for each name.
    """
    calls = {name: functools.partial(jax.jit(step), state, *batch) for name, step in steps.items()}
    measured: dict[str, list[float]] = {name: [] for name in steps}
    for call in calls.values():
        jax.block_until_ready(call())
    end = time.perf_counter() + SECONDS
    while time.perf_counter() < end or min(map(len, measured.values())) < 3:
        for name, call in calls.items():
            start = time.perf_counter()
            jax.block_until_ready(call())
            measured[name].append(time.perf_counter() - start)
    return {name: float(np.median(times)) for name, times in measured.items()}


def print_step_times(without: Step, with_jaxgrad: Step, state: Any, *batch: ArrayLike) -> None:
    """Measures and prints the time of a training step without and with jaxgrad, and the speed-up."""
    times = step_times({"without": without, "with": with_jaxgrad}, state, *batch)
    for name, seconds in times.items():
        print(f"time per step {name} jaxgrad: {1e3 * seconds:.2f} ms (median)")
    print(f"speed-up: {times['without'] / times['with']:.2f}x")


# --- arguments ----------------------------------------------------------------------------------------------------


def argument_parser(
    description: str, *, steps: int, learning_rate: float, plot: str, batch_size: int | None = None
) -> argparse.ArgumentParser:
    """A parser of the arguments that the scripts share, with these defaults; `--batch-size` only if one is given."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--steps", type=positive_int, default=steps, help="training steps")
    if batch_size is not None:
        parser.add_argument("--batch-size", type=positive_int, default=batch_size, help="examples in a step")
    parser.add_argument("--learning-rate", type=positive_float, default=learning_rate, help="of the optimizer")
    parser.add_argument("--seed", type=seed, default=0, help="of the weights and all random choices")
    parser.add_argument("--plot", type=png, default=Path(plot), help="the picture that is saved")
    return parser


def positive_int(text: str) -> int:
    return _checked(int, text, lambda value: value > 0, "a positive integer")


def positive_float(text: str) -> float:
    return _checked(float, text, lambda value: 0 < value < float("inf"), "a positive number")


def seed(text: str) -> int:
    return _checked(int, text, lambda value: 0 <= value < 2**32, "an integer in [0, 2**32)")


def png(text: str) -> Path:
    return _checked(
        Path, text, lambda path: path.suffix == ".png" and path.parent.is_dir(), "a .png file in a folder that exists"
    )


def _checked(kind: Callable[[str], Any], text: str, fits: Callable[[Any], bool], expected: str) -> Any:
    try:
        value = kind(text)
    except ValueError:
        value = None
    if value is None or not fits(value):
        raise argparse.ArgumentTypeError(f"must be {expected}, got {text}")
    return value
