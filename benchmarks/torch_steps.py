"""The peer from PyTorch: the same training step, on the same parameters, with activations in channels_last."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import torch
from torch.nn import functional

from benchmarks import models
from benchmarks.steps import LEARNING_RATE, MOMENTUM, STATISTICS_MOMENTUM, State


def training_step(
    network: models.Network, state: State, images: jax.Array, labels: jax.Array
) -> tuple[Callable[[], Any], list[np.ndarray]]:
    """The function to time, which trains in place, and what its first call came to, as `steps.training_step` has it."""
    layers = [models.Layer(_weights(w), _tensor(s), _tensor(b)) for w, s, b in state.params.layers]
    params = models.Params(layers, _tensor(state.params.head_w), _tensor(state.params.head_b))
    leaves = [leaf.requires_grad_() for leaf in jax.tree.leaves(params)]
    running = [_tensor(array) for array in jax.tree.leaves(state.statistics)]
    optimizer = torch.optim.SGD(leaves, LEARNING_RATE, MOMENTUM)
    x = torch.tensor(np.array(images)).movedim(-1, 1)  # a view: NCHW in the memory of NHWC
    classes = torch.tensor(np.array(labels), dtype=torch.long)

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        scores, batch = models.scores(_TORCH, network, params, x)
        loss = functional.cross_entropy(scores, classes)
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            torch._foreach_lerp_(running, [s.detach() for pair in batch for s in pair], 1 - STATISTICS_MOMENTUM)
        return loss

    loss = step()
    velocities = [optimizer.state[leaf]["momentum_buffer"] for leaf in leaves]
    return step, [_numpy(t) for t in (*leaves, *velocities, *running, loss)]


def _tensor(array: jax.Array) -> torch.Tensor:
    return torch.tensor(np.array(array))


def _weights(w: jax.Array) -> torch.Tensor:
    """HWIO to OIHW."""
    return _tensor(w).permute(3, 2, 0, 1).contiguous(memory_format=torch.channels_last)


def _numpy(t: torch.Tensor) -> np.ndarray:
    t = t.detach()
    return (t.permute(2, 3, 1, 0) if t.ndim == 4 else t).numpy().copy()


def _conv(x: torch.Tensor, w: torch.Tensor, conv: models.Conv) -> torch.Tensor:
    return functional.conv2d(x, w, None, conv.stride, conv.window // 2, groups=conv.groups)


def _batch_norm(
    x: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor, residual: torch.Tensor | None, relu: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    # The op behind functional.batch_norm: it returns the statistics too.
    y, mean, rstd = torch.native_batch_norm(x, scale, bias, None, None, True, 0.0, 1e-5)
    y = y if residual is None else y + residual
    return torch.relu(y) if relu else y, mean, rstd.detach() ** -2 - 1e-5


def _max_pool(x: torch.Tensor) -> torch.Tensor:
    return functional.max_pool2d(x, 3, 2, 1)


_TORCH = models.Library(_conv, _batch_norm, _max_pool, lambda x: x.mean((2, 3)))
