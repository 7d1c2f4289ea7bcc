"""Trains a character-level language model, a GRU of two layers, on the reference texts that come with Python.

The text is that of `help("topics")`: about 400 000 characters, of which the last tenth is held out for the test. The
rest is cut into B streams. A training step takes the next T characters of each stream, and the hidden states go on from
one step to the next (truncated backpropagation through time).

  pip install ".[examples]"
  python examples/train_char_gru.py
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from pydoc_data.topics import topics
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import plain_gru
import training
from jax import lax
from matplotlib.figure import Figure

import jaxgrad.nn

LAYERS, PROMPT, TEMPERATURE = 2, "The ", 0.7  # the sample comes from logits divided by the temperature
RunGRU = Callable[[jaxgrad.nn.GRU, jax.Array, jax.Array], tuple[jax.Array, jax.Array]]


Params = dict[str, Any]  # "embedding" [V, H] of the V different characters, "gru" with H hidden units, "head" [H, V]


class State(NamedTuple):
    """All that a training step takes and returns."""

    params: Params
    optimizer: Any
    h: jax.Array  # [LAYERS, B, H], the hidden states of the streams


def load() -> tuple[str, np.ndarray, np.ndarray]:
    """The alphabet, and both splits as indices into it. Paragraphs that recur are taken once."""
    paragraphs = "\n\n".join(topics[name] for name in sorted(topics)).split("\n\n")
    text = "\n\n".join(dict.fromkeys(paragraphs))
    alphabet, indices = np.unique(list(text), return_inverse=True)
    train, test = np.split(indices.astype(np.int32), [-(len(text) // 10)])
    return "".join(alphabet), train, test


def ngram_bits(train: np.ndarray, test: np.ndarray, symbols: int) -> dict[str, float]:
    """Test bits per character of models that count pairs of characters in the training text, each 0.1 times more."""
    counts = np.full((symbols, symbols), 0.1)
    np.add.at(counts, (train[:-1], train[1:]), 1)
    unigram, bigram = counts.sum(0) / counts.sum(), counts / counts.sum(1, keepdims=True)
    found = {"unigram": unigram[test[1:]], "bigram": bigram[test[:-1], test[1:]]}
    return {f"{name} model, test": float(-np.log2(values).mean()) for name, values in found.items()}


def windows(text: np.ndarray, streams: int, length: int) -> Iterator[np.ndarray]:
    """Windows [length + 1, streams], without end. The last characters of one are the first ones of the next."""
    columns = text[: len(text) // streams * streams].reshape(streams, -1).T
    starts = range(0, len(columns) - length, length)
    return (columns[start : start + length + 1] for start in itertools.cycle(starts))


def predict(run: RunGRU, params: Params, characters: jax.Array, h: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Logits [T, B, V] of the characters that follow `characters` [T, B], and the next hidden states."""
    y, h = run(params["gru"], params["embedding"][characters], h)
    return y @ params["head"], h


def bits(run: RunGRU, params: Params, characters: jax.Array, h: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Bits per character of `characters` [T + 1, B] after the first ones, and the next hidden states."""
    logits, h = predict(run, params, characters[:-1], h)
    nats = optax.softmax_cross_entropy_with_integer_labels(logits, characters[1:])
    return nats.mean() / jnp.log(2), h


def training_step(run: RunGRU, optimizer: optax.GradientTransformation) -> training.Step:
    def step(state: State, characters: jax.Array) -> tuple[State, dict[str, jax.Array]]:
        def loss_fn(params: Params) -> tuple[jax.Array, jax.Array]:
            return bits(run, params, characters, state.h)

        (loss, h), gradients = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
        updates, optimizer_state = optimizer.update(gradients, state.optimizer)
        return State(optax.apply_updates(state.params, updates), optimizer_state, h), {"training": loss}

    return step


@jax.jit
def sample(params: Params, prompt: jax.Array, h: jax.Array, keys: jax.Array) -> jax.Array:
    """Draws a character after the prompt [T] for each key: one call for the prompt, then calls of a single step."""
    run = jaxgrad.nn.GRU.__call__

    def draw(state: tuple[jax.Array, jax.Array], key: jax.Array) -> tuple[Any, jax.Array]:
        logits, h = state
        drawn = jax.random.categorical(key, logits[-1, 0] / TEMPERATURE)
        return predict(run, params, drawn[None, None], h), drawn

    logits, h = predict(run, params, prompt[:, None], h)
    return lax.scan(draw, (logits[-1:], h), keys)[1]


def main(arguments: Sequence[str] | None = None) -> None:
    description, plot = "Trains a GRU to continue English text.", "train_char_gru.png"
    parser = training.argument_parser(description, steps=1000, batch_size=32, learning_rate=1e-2, plot=plot)
    parser.add_argument("--length", type=training.positive_int, default=64, help="characters of a stream in a step")
    parser.add_argument("--hidden", type=training.positive_int, default=192, help="units of each layer")
    args = parser.parse_args(arguments)
    alphabet, train, test = load()
    if args.length >= len(train) // args.batch_size:
        parser.error(f"--batch-size times --length must be less than {len(train)} characters, the training text")

    keys = jax.random.split(jax.random.key(args.seed), 3)
    V, H, initial_h = len(alphabet), args.hidden, jnp.zeros((LAYERS, args.batch_size, args.hidden))
    gru, embedding = jaxgrad.nn.GRU(H, H, LAYERS, key=keys[0]), jax.random.normal(keys[1], (V, H))
    params = {"gru": gru, "embedding": embedding, "head": jnp.zeros((H, V))}
    optimizer = optax.adam(optax.cosine_decay_schedule(args.learning_rate, args.steps))
    step, plain = (training_step(run, optimizer) for run in (jaxgrad.nn.GRU.__call__, plain_gru.run))

    batches = windows(train, args.batch_size, args.length)
    first = State(params, optimizer.init(params), initial_h)
    state, history = training.fit(step, first, lambda rng: (next(batches),), args)
    training.print_step_times(plain, step, state, next(batches))

    print(jaxgrad.explain(jaxgrad.gru))
    tested = ngram_bits(train, test, V)
    tested["GRU, test"] = float(bits(jaxgrad.nn.GRU.__call__, state.params, test[:, None], initial_h[:, :1])[0])
    for name, value in tested.items():
        print(f"{name}: {value:.3f} bits per character")
    prompt = jnp.array([alphabet.index(character) for character in PROMPT])
    drawn = sample(state.params, prompt, initial_h[:, :1], jax.random.split(keys[2], 300))
    print(f"sample: {PROMPT}{''.join(alphabet[i] for i in drawn)}")
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    for style, (name, value) in zip((":", "-.", "--"), tested.items(), strict=True):
        axes.axhline(value, color="gray", linestyle=style, label=name)
    training.draw_curves(axes, history, "bits per character")
    figure.savefig(args.plot, dpi=150)
    print(f"curves: {args.plot}")


if __name__ == "__main__":
    main()
