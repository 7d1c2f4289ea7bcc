"""The peer from PyTorch: torch.nn.functional.batch_norm, on arrays laid out in memory as ours are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import torch


def passes(
    inputs: tuple[jax.Array, ...], dy: jax.Array, *, feature_axis: int, relu: bool, on_gpu: bool
) -> dict[str, tuple[Callable[[], Any], list[np.ndarray]]]:
    """Of "forward" and "forward+backward": the function to time, and its outputs in jaxgrad's order and shapes.

    Args:
      inputs: x, scale, bias and maybe a residual, as `jaxgrad.batch_norm_training` takes them.
    """
    device = "cuda" if on_gpu else "cpu"

    def tensor(array: jax.Array) -> torch.Tensor:
        dtype = getattr(torch, array.dtype.name)
        return torch.tensor(np.array(array, np.float32), device=device).to(dtype)

    def channels_second(
        array: jax.Array,
    ) -> torch.Tensor:  # a view: with four axes and the channels last, channels_last
        return tensor(array).movedim(feature_axis, 1)

    def numpy(t: torch.Tensor) -> np.ndarray:
        t = t.detach().float().cpu()
        return (t.movedim(1, feature_axis) if t.ndim > 1 else t).numpy()

    x, *residual = (channels_second(array).requires_grad_() for array in (inputs[0], *inputs[3:]))
    scale, bias = (tensor(array).requires_grad_() for array in inputs[1:3])
    dy_t = channels_second(dy)

    def normalized() -> torch.Tensor:
        y = torch.nn.functional.batch_norm(x, None, None, scale, bias, training=True, eps=1e-5)
        y = y + residual[0] if residual else y
        return torch.relu(y) if relu else y

    def forward() -> Any:
        with torch.no_grad():
            return normalized()

    def forward_backward() -> Any:
        y = normalized()
        return y.detach(), *torch.autograd.grad(y, (x, scale, bias, *residual), dy_t)

    return {
        "forward": (forward, [numpy(forward())]),
        "forward+backward": (forward_backward, [numpy(t) for t in forward_backward()]),
    }
