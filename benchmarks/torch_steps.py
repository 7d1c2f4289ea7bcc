"""The peer in PyTorch: the same training step on the same parameters, with activations in channels_last."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import torch
from torch.nn import functional

from benchmarks import torch_peers
from benchmarks.networks import Network
from benchmarks.networks.torch_ops import TorchOps, activations, layer, to_jax
from benchmarks.training import LEARNING_RATE, MOMENTUM, STATISTICS_MOMENTUM, State
from jaxgrad._src.bench import torch_calls


def training_step(
    network: Network, state: State, x: jax.Array, target: jax.Array, *, compiled: bool
) -> tuple[Callable[[], Any], tuple[State, Any], int | None]:
    """The function to time, which trains in place, and the result of its first call, like that of training.py.

    Args:
      compiled: whether torch.compile compiles the loss and its gradients. The optimizer is eager in any case.

    Returns:
      The function; the state and the loss; on a GPU the peak memory of a step in bytes.
    """
    device = torch_calls.device()
    params = [layer(those, device) for those in state.params]
    leaves, structure = jax.tree.flatten(params)
    running = [tuple(torch.tensor(np.array(a), device=device) for a in pair) for pair in state.statistics]
    optimizer = torch.optim.SGD(leaves, LEARNING_RATE, MOMENTUM)
    inputs = activations(x, device)
    labels = torch.tensor(np.array(target), device=device).long() if network.classifies else activations(target, device)
    loss_of = functional.cross_entropy if network.classifies else functional.mse_loss
    counts: list[int] = []  # of elements in the moments of each batch normalization

    def forward(params: list[Any], inputs: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, list[int]]:
        ops = TorchOps(params, running, STATISTICS_MOMENTUM)
        return loss_of(network.run(ops, inputs), labels), ops.statistics

    if compiled:
        torch_peers.forget()
        forward = torch_peers.compiled(forward)

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        loss, counts[:] = forward(params, inputs, labels)
        loss.backward()
        optimizer.step()
        return loss.detach()

    def biased(var: torch.Tensor, old: jax.Array, count: int) -> np.ndarray:
        """The running mean of biased variances, from PyTorch's running mean of unbiased ones."""
        kept = STATISTICS_MOMENTUM * np.array(old)
        return kept + (var.cpu().numpy() - kept) * (count - 1) / count

    loss = step()
    velocity = jax.tree.unflatten(structure, [optimizer.state[leaf]["momentum_buffer"] for leaf in leaves])
    statistics = [
        (mean.cpu().numpy().copy(), biased(var, old, count))
        for (mean, var), (_, old), count in zip(running, state.statistics, counts, strict=True)
    ]
    found = State(
        [to_jax(like, those) for like, those in zip(state.params, params, strict=True)],
        [to_jax(like, those) for like, those in zip(state.params, velocity, strict=True)],
        statistics,
    )
    return step, (found, loss.float().cpu().numpy()), torch_peers.peak_bytes(step)
