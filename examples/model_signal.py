"""Trains a WaveNet of flax to predict the voltage of a nerve cell, without and with `jaxgrad.accelerate`.

The recording comes with matplotlib: 6 s of a membrane potential, 2000 samples per second. The cell fires while a
current flows. The network has the causal, dilated convolutions and gates of van den Oord et al., "WaveNet: A Generative
Model for Raw Audio" (2016). It predicts the distribution of the next sample, a mixture of logistic distributions. It is
trained on the first three quarters. The test on the rest counts the bits in which a sample can be coded. The baseline
is a linear prediction from the last 32 samples, with the histogram of its errors.

  pip install ".[examples]"
  python examples/model_signal.py
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import training
from jax import lax
from jax.typing import ArrayLike
from matplotlib.cbook import get_sample_data
from matplotlib.figure import Figure

import jaxgrad

VOLTS = 10 / 4095  # between two levels of the converter
RATE = 2000  # samples per second
CENTER, SCALE = 110, 50  # rough mean and deviation of the levels
DILATIONS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
REACH = 1 + 1 + sum(DILATIONS)  # samples that a prediction depends on
FEATURES, COMPONENTS = 32, 5
CROP = 1024  # predicted samples of a training example
ORDER = 32  # of the linear prediction
GENERATED = 1000  # samples


class WaveNet(nn.Module):
    """For levels [N, T] the mixtures of the next ones: log weights, means and log scales [N, T, COMPONENTS]."""

    @nn.compact
    def __call__(self, levels: ArrayLike) -> tuple[jax.Array, jax.Array, jax.Array]:
        levels = jnp.asarray(levels, jnp.float32)[..., None]
        x, skips = nn.Conv(FEATURES, (2,), padding="CAUSAL")((levels - CENTER) / SCALE), 0
        for dilation in DILATIONS:
            gated = nn.Conv(2 * FEATURES, (2,), padding="CAUSAL", kernel_dilation=dilation)(x)
            value, gate = jnp.split(gated, 2, axis=-1)
            y = jnp.tanh(value) * jax.nn.sigmoid(gate)
            x, skips = x + nn.Dense(FEATURES)(y), skips + nn.Dense(FEATURES)(y)
        outputs = nn.Dense(3 * COMPONENTS)(nn.relu(nn.Dense(FEATURES)(nn.relu(skips))))
        weights, means, scales = jnp.split(outputs, 3, axis=-1)
        return jax.nn.log_softmax(weights), levels + SCALE / 10 * means, scales


def bits(mixture: tuple[jax.Array, jax.Array, jax.Array], levels: ArrayLike) -> jax.Array:
    """Minus the log2 probability of levels [N, T], that of the values which round to them."""
    log_weights, means, log_scales = mixture
    below, above = ((jnp.asarray(levels)[..., None] + half - means) * jnp.exp(-log_scales) for half in (-0.5, 0.5))
    # The log of sigmoid(above) - sigmoid(below), without cancellation.
    log_probs = jax.nn.log_sigmoid(above) + jax.nn.log_sigmoid(-below) + jnp.log(-jnp.expm1(below - above))
    return -jax.nn.logsumexp(log_weights + log_probs, axis=-1) / jnp.log(2)


def linear_prediction_bits(levels: np.ndarray, start: int) -> float:
    """The mean bits of levels[start:] under a linear model and a histogram of its errors, from levels[:start]."""
    past = np.lib.stride_tricks.sliding_window_view(levels[:-1], ORDER)
    past = np.concatenate([past, np.ones((len(past), 1))], axis=1)
    fitted = start - ORDER
    weights = np.linalg.lstsq(past[:fitted], levels[ORDER:start])[0]
    errors = levels[ORDER:] - np.round(past @ weights).astype(int)
    counts = np.bincount(errors[:fitted] + 512, minlength=1024) + 0.1  # of errors from -512 on
    return float(-np.log2(counts / counts.sum())[errors[fitted:] + 512].mean())


def continuation(params: Any, levels: np.ndarray, count: int, key: jax.Array) -> jax.Array:
    """Draws levels [count] that may follow `levels`, one after the other, and limits them to the range of `levels`."""

    def draw(window: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        log_weights, means, log_scales = (array[0, -1] for array in WaveNet().apply(params, window[None]))
        key, component_key = jax.random.split(key)
        component = jax.random.categorical(component_key, log_weights)
        level = jnp.round(means[component] + jnp.exp(log_scales[component]) * jax.random.logistic(key))
        level = level.clip(levels.min(), levels.max())
        return jnp.append(window[1:], level), level

    window = jnp.asarray(levels, jnp.float32)[-REACH:]
    return jax.jit(lambda: lax.scan(draw, window, jax.random.split(key, count))[1])()


def main(arguments: Sequence[str] | None = None) -> None:
    description = "Trains a WaveNet to predict the voltage of a nerve cell, without and with jaxgrad.accelerate."
    args = training.argument_parser(
        description, steps=300, learning_rate=3e-3, batch_size=4, plot="model_signal.png"
    ).parse_args(arguments)
    volts = np.fromfile(get_sample_data("membrane.dat", asfileobj=False), np.float32)
    levels = np.round((volts - volts.min()) / VOLTS).astype(np.int32)
    start = len(levels) * 3 // 4
    model = WaveNet()
    optimizer = optax.adamw(optax.cosine_decay_schedule(args.learning_rate, args.steps), weight_decay=1e-2)

    def loss_of(params: Any, levels: ArrayLike) -> jax.Array:
        return bits(model.apply(params, levels[:, :-1]), levels[:, 1:]).mean()

    def batch(rng: np.random.Generator) -> tuple[np.ndarray]:
        return (np.array([levels[i : i + CROP + 1] for i in rng.integers(start - CROP, size=args.batch_size)]),)

    step = training.gradient_step(loss_of, optimizer)
    accelerated = jaxgrad.accelerate(step)
    params = model.init(jax.random.key(args.seed), levels[None, :CROP])
    state, history = training.fit(accelerated, training.State(params, optimizer.init(params)), batch, args)
    mixture = jax.jit(model.apply)(state.params, levels[None, :-1])
    test_bits = bits(mixture, levels[None, 1:])[0, start - 1 :].mean()
    linear_bits = linear_prediction_bits(levels, start)
    print(f"test bits per sample: {test_bits:.3f}, by linear prediction {linear_bits:.3f}")
    training.print_step_times(step, accelerated, state, *batch(np.random.default_rng(args.seed)))
    predicted = (jnp.exp(mixture[0]) * mixture[1]).sum(-1)[0, start - 1 :]
    drawn = continuation(state.params, levels[:start], GENERATED, jax.random.key(args.seed))
    save_picture(levels, {"predicted": predicted, "generated": drawn}, history, args.plot)
    print(f"the recording, its prediction and a generated continuation: {args.plot}")


def save_picture(
    levels: np.ndarray, following: dict[str, jax.Array], history: dict[str, np.ndarray], path: Path
) -> None:
    """Draws the recording, and two kinds of levels that follow its training part, beside the recorded ones."""
    figure = Figure(figsize=(12, 6), layout="constrained")
    (recording, predicted), (curve, generated) = figure.subplots(2, 2)
    start = len(levels) * 3 // 4
    recording.plot(np.arange(start) / RATE, levels[:start], label="training")
    recording.plot(np.arange(start, len(levels)) / RATE, levels[start:], label="test")
    for axes, (name, values), count in zip((predicted, generated), following.items(), (400, GENERATED), strict=True):
        seconds = np.arange(start, start + count) / RATE
        axes.plot(seconds, levels[start : start + count], label="test")
        axes.plot(seconds, values[:count], linewidth=1, label=name)
    for axes in (recording, predicted, generated):
        axes.set(xlabel="time (s)", ylabel="level")
        axes.legend()
    training.draw_curves(curve, history, "bits per sample")
    figure.savefig(path, dpi=100)


if __name__ == "__main__":
    main()
