"""The peer in PyTorch: torch.nn.GRU, which applies the reset gate after the recurrent product."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import torch

Arrays = tuple[jax.Array, ...]


def passes(
    inputs: Arrays, cotangents: Arrays, *, bidirectional: bool, on_gpu: bool, allow_tf32: bool = True
) -> dict[str, tuple[Callable[[], Any], list[np.ndarray]]]:
    """Of "forward" and "forward+backward": the function to time, and its outputs in jaxgrad's order and shapes.

    Args:
      inputs: x, w, r, b and initial_h, as `jaxgrad.gru` takes them.
      cotangents: dy [T, D, B, H] and dy_h [D, B, H].
      bidirectional, on_gpu: whether the layer has two directions, and runs on a GPU.
      allow_tf32: whether float32 products may round their operands to TF32.
    """
    device = "cuda" if on_gpu else "cpu"
    dtype = getattr(torch, inputs[0].dtype.name)

    def tensor(array: Any) -> torch.Tensor:
        return torch.tensor(np.array(array, np.float32), device=device).to(dtype)

    x, w, r, b, initial_h = inputs
    D, H = r.shape[0], r.shape[2]
    module = torch.nn.GRU(x.shape[2], H, bidirectional=bidirectional, device=device, dtype=dtype)
    with torch.no_grad():
        for d in range(D):
            ours = (w[d], r[d], b[d, : 3 * H], b[d, 3 * H :])
            for parameter, value in zip(module.all_weights[d], ours, strict=True):
                parameter.copy_(tensor(swap_z_and_r(np.asarray(value))))
    x_t, h_t = tensor(x).requires_grad_(), tensor(initial_h).requires_grad_()
    dy, dy_h = (tensor(c) for c in cotangents)
    dy = dy.transpose(1, 2).flatten(2)  # [T, B, D * H], as the module's outputs
    operands = (x_t, h_t, *(p for weights in module.all_weights for p in weights))

    def set_precision() -> None:
        torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = allow_tf32

    def forward() -> Any:
        set_precision()
        with torch.no_grad():
            return module(x_t, h_t)

    def forward_backward() -> Any:
        set_precision()
        return torch.autograd.grad(module(x_t, h_t), operands, (dy, dy_h))

    y, y_h = (_numpy(t) for t in forward())
    dx, dh0, *weights = (_numpy(t) for t in forward_backward())
    per_direction = [[swap_z_and_r(g) for g in weights[4 * d : 4 * d + 4]] for d in range(D)]
    dw, dr, dwb, drb = (np.stack(gradients) for gradients in zip(*per_direction, strict=True))
    return {
        "forward": (forward, [y.reshape(*y.shape[:2], D, H).swapaxes(1, 2), y_h]),
        "forward+backward": (forward_backward, [dx, dw, dr, np.concatenate([dwb, drb], 1), dh0]),
    }


def swap_z_and_r(array: np.ndarray) -> np.ndarray:
    """Between our gate order, z r h, and PyTorch's, r z n, along the first axis."""
    z, r, h = np.split(array, 3)
    return np.concatenate([r, z, h])


def _numpy(tensor: torch.Tensor) -> np.ndarray:
    return tensor.detach().float().cpu().numpy()
