"""Fine-tunes a GRU of PyTorch in JAX, and writes its weights back.

The model reads scikit-learn's handwritten digits, one row of pixels at a time. PyTorch trains it on the digits as they
are, or `--weights` has its state dict. jaxgrad reads the weights, and fine-tunes them on digits with noise. A training
from random weights shows the difference. At the end, PyTorch computes the same logits with the new weights.

  pip install ".[examples]" torch
  python examples/fine_tune_torch_gru.py --save fine_tuned.pt
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import digits
import jax
import jax.numpy as jnp
import numpy as np
import optax
import plain_gru
import training
from matplotlib.figure import Figure
from tqdm import tqdm

import jaxgrad.convert.torch
import jaxgrad.nn

try:
    import torch
except ModuleNotFoundError:
    raise SystemExit("fine_tune_torch_gru.py requires PyTorch; a build for CPUs is enough: pip install torch") from None

LAYERS, NOISE = 2, 0.3  # the standard deviation of the noise, on pixels in [0, 1]
Params = dict[str, Any]  # the weights of a Reader in JAX: "gru" of H hidden units, "head_w" [10, H], "head_b" [10]


class Reader(torch.nn.Module):
    """The model in PyTorch: the last state of a GRU goes through a linear layer to the ten classes."""

    def __init__(self, hidden: int):
        super().__init__()
        self.gru = torch.nn.GRU(digits.SIZE, hidden, LAYERS, batch_first=True)
        self.head = torch.nn.Linear(hidden, digits.CLASSES)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.gru(images)[0][:, -1])


def read(model: Reader) -> Params:
    weights = model.state_dict()
    head = {"head_w": jnp.array(weights["head.weight"].numpy()), "head_b": jnp.array(weights["head.bias"].numpy())}
    return {"gru": jaxgrad.nn.GRU.from_weights(jaxgrad.convert.torch.read_gru(weights, "gru.")), **head}


def write(params: Params, model: Reader) -> None:
    gru = jaxgrad.convert.torch.write_gru(params["gru"].layers, "gru.")
    weights = {**gru, "head.weight": params["head_w"], "head.bias": params["head_b"]}
    model.load_state_dict({name: torch.tensor(np.asarray(array)) for name, array in weights.items()})


def train_in_torch(model: Reader, batches: Sequence[tuple[np.ndarray, np.ndarray]], learning_rate: float) -> None:
    torch.set_num_threads(1)  # the model is too small for more
    optimizer = torch.optim.Adam(model.parameters(), learning_rate)
    for images, labels in tqdm(batches, unit="step", desc="PyTorch"):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(torch.tensor(images)), torch.tensor(labels).long()).backward()
        optimizer.step()


@torch.no_grad()
def predict_in_torch(model: Reader, images: np.ndarray) -> np.ndarray:
    return model(torch.tensor(images)).numpy()


def predict(run: Callable[..., Any], params: Params, images: jax.Array) -> jax.Array:
    """Logits [N, 10] of images [N, 8, 8]."""
    _, h = run(params["gru"], jnp.swapaxes(images, 0, 1), jnp.zeros((LAYERS, len(images), params["head_w"].shape[1])))
    return h[-1] @ params["head_w"].T + params["head_b"]


def mean_loss(run: Callable[..., Any], params: Params, images: jax.Array, labels: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(predict(run, params, images), labels).mean()


def main(arguments: Sequence[str] | None = None) -> None:
    description, plot = "Fine-tunes a GRU of PyTorch in JAX.", "fine_tune_torch_gru.png"
    parser = training.argument_parser(description, steps=150, batch_size=64, learning_rate=3e-3, plot=plot)
    parser.add_argument("--torch-steps", type=training.positive_int, default=200, help="steps before, in PyTorch")
    parser.add_argument("--hidden", type=training.positive_int, default=128, help="units of each layer")
    parser.add_argument("--weights", type=Path, help="a state dict of Reader, instead of the training in PyTorch")
    parser.add_argument("--save", type=Path, help="where the new state dict is saved")
    args = parser.parse_args(arguments)
    data, rng = digits.load(args.seed), np.random.default_rng(args.seed)
    noisy = data.images_test + NOISE * rng.standard_normal(data.images_test.shape, np.float32)

    def draw(rng: np.random.Generator, noise: float) -> tuple[np.ndarray, np.ndarray]:
        rows = rng.integers(len(data.images_train), size=args.batch_size)
        pixels = rng.standard_normal((args.batch_size, digits.SIZE, digits.SIZE), np.float32)
        return data.images_train[rows] + noise * pixels, data.labels_train[rows]

    def print_accuracy(name: str, scores: Any) -> None:
        print(f"{name}: {np.mean(np.argmax(scores, 1) == data.labels_test):.2%} of {len(scores)} test digits")

    torch.manual_seed(args.seed)
    model, random_weights = Reader(args.hidden), read(Reader(args.hidden))
    if args.weights is None:
        train_in_torch(model, [draw(rng, 0) for _ in range(args.torch_steps)], args.learning_rate)
    else:
        try:
            model.load_state_dict(torch.load(args.weights, weights_only=True))
        except (OSError, RuntimeError, pickle.UnpicklingError) as error:
            parser.error(f"argument --weights: {error}")
    print_accuracy("PyTorch, with noise", predict_in_torch(model, noisy))

    optimizer = optax.adam(optax.cosine_decay_schedule(args.learning_rate, args.steps))
    run, curves = jaxgrad.nn.GRU.__call__, {}
    step, plain = (training.gradient_step(partial(mean_loss, f), optimizer) for f in (run, plain_gru.run))
    for name, params in {"from random weights": random_weights, "from PyTorch's weights": read(model)}.items():
        start = training.State(params, optimizer.init(params))
        state, history = training.fit(step, start, partial(draw, noise=NOISE), args)
        scores = predict(run, state.params, noisy)
        print_accuracy(f"jaxgrad, {name}, with noise", scores)
        curves[name] = history["loss"]
    training.print_step_times(plain, step, state, *draw(rng, NOISE))
    print(jaxgrad.explain(jaxgrad.gru))

    write(state.params, model)
    print_accuracy("PyTorch with the new weights, with noise", predict_in_torch(model, noisy))
    print(f"the logits differ by at most {np.abs(predict_in_torch(model, noisy) - scores).max():.0e}")
    if args.save is not None:
        torch.save(model.state_dict(), args.save)
    figure = Figure(figsize=(6, 4), layout="constrained")
    training.draw_curves(figure.subplots(), curves, "loss on noisy digits (nats)")
    figure.savefig(args.plot, dpi=150)
    print(f"curves: {args.plot}")


if __name__ == "__main__":
    main()
