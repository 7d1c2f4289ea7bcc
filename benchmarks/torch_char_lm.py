"""The peer in PyTorch of the language model in recurrent_models.py: nn.Embedding, nn.GRU with two layers, nn.Linear."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import torch
from torch.nn import functional

from benchmarks.recurrent_models import LEARNING_RATE, MOMENTUM, Dense, Gru, State
from benchmarks.torch_peers import numpy_of, peak_bytes, swap_z_and_r
from jaxgrad._src.bench import torch_calls


def training_step(
    state: State, text: jax.Array, initial_h: jax.Array
) -> tuple[Callable[[], Any], list[np.ndarray], int | None]:
    """The function to time, which trains in place, and the results of its first call as those of recurrent_models.py.

    Returns:
      The function; the leaves of the state and the loss; on a GPU the peak memory of a step in bytes.
    """
    device = torch_calls.device()
    dtype = getattr(torch, initial_h.dtype.name)
    symbols, H = state.params["embedding"].shape

    def tensor(array: Any) -> torch.Tensor:
        return torch.tensor(np.array(array, np.float32), device=device).to(dtype)

    embedding = torch.nn.Embedding(symbols, H, device=device, dtype=dtype)
    gru = torch.nn.GRU(H, H, num_layers=2, device=device, dtype=dtype)
    logits = torch.nn.Linear(H, symbols, device=device, dtype=dtype)
    params = {
        "embedding": embedding.weight,
        "gru1": gru.all_weights[0],
        "gru2": gru.all_weights[1],
        "logits": [logits.weight, logits.bias],
    }
    with torch.no_grad():
        for name, layer in params.items():
            for parameter, value in zip(_list(layer), _to_torch(state.params[name]), strict=True):
                parameter.copy_(tensor(value))
    leaves = [parameter for layer in params.values() for parameter in _list(layer)]
    optimizer = torch.optim.SGD(leaves, LEARNING_RATE, MOMENTUM)
    symbols_of_text, h = torch.tensor(np.array(text), device=device).long(), tensor(initial_h)

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        y, _ = gru(embedding(symbols_of_text[:-1]), h)
        loss = functional.cross_entropy(logits(y).float().flatten(0, 1), symbols_of_text[1:].flatten())
        loss.backward()
        optimizer.step()
        return loss.detach()

    loss = step()

    def found(of: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, Any]:
        return {
            name: _to_jax(state.params[name], [numpy_of(of(p)) for p in _list(each)]) for name, each in params.items()
        }

    after = State(found(lambda p: p), found(lambda p: optimizer.state[p]["momentum_buffer"]))
    return step, [*jax.tree.leaves(after), numpy_of(loss)], peak_bytes(step)


def _to_torch(layer: Any) -> list[np.ndarray]:
    """The parameters of a layer in PyTorch's order and layout."""
    if isinstance(layer, Gru):
        w, r, b = (np.asarray(array, np.float32) for array in layer)
        return [swap_z_and_r(array) for array in (w, r, *np.split(b, 2))]
    if isinstance(layer, Dense):
        return [np.asarray(layer.w, np.float32).T, np.asarray(layer.b, np.float32)]
    return [np.asarray(layer, np.float32)]


def _to_jax(like: Any, layer: list[np.ndarray]) -> Any:
    if isinstance(like, Gru):
        w, r, *biases = (swap_z_and_r(array) for array in layer)
        return Gru(w, r, np.concatenate(biases))
    return Dense(layer[0].T, layer[1]) if isinstance(like, Dense) else layer[0]


def _list(layer: Any) -> list[torch.Tensor]:
    return list(layer) if isinstance(layer, list) else [layer]
