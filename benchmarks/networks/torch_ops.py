"""The operations in PyTorch, on activations [N, C, ...] in the memory of [N, ..., C], channels_last.

PyTorch has channels_last for two and three spatial axes: with one, arrays have a first spatial axis of size 1, and with
it the faster kernels of the 2D convolution.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax
import numpy as np
import torch
from torch.nn import functional

from benchmarks.networks.ops import (
    BATCH_NORM_EPSILON,
    GROUP_NORM_EPSILON,
    GROUPS,
    LAYER_NORM_EPSILON,
    Conv,
    ConvTranspose,
    Dense,
    Norm,
    Ops,
    Scale,
    Window,
)


class TorchOps(Ops):
    """Activations and sums are written in place where that is safe, as in torchvision.

    Args:
      running: the running (mean, var) of each batch normalization, which PyTorch updates.
      momentum: the share of its running statistics that a batch normalization keeps.

    `statistics` has the number of elements in the moments of each batch normalization.
    """

    def __init__(self, params: Iterable[Any], running: Iterable[Any], momentum: float) -> None:
        super().__init__(params)
        self._running, self._momentum = iter(running), momentum

    def _conv(self, x: torch.Tensor, layer: Conv, window: Window, relu: bool) -> torch.Tensor:
        low, high = window.pads
        n = x.ndim - 2
        pads = [low if size > 1 else 0 for size in layer.w.shape[2:]]  # 0 on the axis that makes one axis two
        if low != high:
            x = functional.pad(x, [end for pad in reversed(pads) for end in ((pad, high) if pad else (0, 0))])
            pads = [0] * n
        strides, dilations = [window.stride] * n, [window.dilation] * n
        y = torch.convolution(x, layer.w, layer.bias, strides, pads, dilations, False, [0] * n, window.groups)
        return y.relu_() if relu else y

    def _conv_transpose(self, x: torch.Tensor, layer: ConvTranspose, stride: int) -> torch.Tensor:
        n = x.ndim - 2
        return torch.convolution(x, layer.w, layer.bias, [stride] * n, [0] * n, [1] * n, True, [0] * n, 1)

    def _batch_norm(
        self, x: torch.Tensor, layer: Norm, residual: torch.Tensor | None, activation: str | None
    ) -> torch.Tensor:
        mean, var = next(self._running)
        self.statistics.append(x.numel() // x.shape[1])
        y = functional.batch_norm(x, mean, var, layer.scale, layer.bias, True, 1 - self._momentum, BATCH_NORM_EPSILON)
        y = y if residual is None else y.add_(residual)
        if activation == "relu":
            return y.relu_()
        return y if activation is None else self.silu(y)

    def _layer_norm(self, x: torch.Tensor, layer: Norm) -> torch.Tensor:
        y = functional.layer_norm(x.movedim(1, -1), layer.scale.shape, layer.scale, layer.bias, LAYER_NORM_EPSILON)
        return y.movedim(-1, 1)

    def _group_norm(self, x: torch.Tensor, layer: Norm, activation: str | None) -> torch.Tensor:
        y = functional.group_norm(x, GROUPS, layer.scale, layer.bias, GROUP_NORM_EPSILON)
        return y if activation is None else self.silu(y)

    def _dense(self, x: torch.Tensor, layer: Dense) -> torch.Tensor:
        return torch.addmm(layer.bias, x, layer.w)

    def _scale(self, x: torch.Tensor, layer: Scale) -> torch.Tensor:
        return x * layer.scale.view(-1, *(1,) * (x.ndim - 2))

    def _attention(self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, heads: int) -> torch.Tensor:
        def by_head(x: torch.Tensor) -> torch.Tensor:
            return x.flatten(2).mT.unflatten(-1, (heads, -1)).transpose(1, 2)

        y = functional.scaled_dot_product_attention(by_head(queries), by_head(keys), by_head(values))
        return y.transpose(1, 2).flatten(2).mT.unflatten(2, queries.shape[2:])

    def relu(self, x: torch.Tensor) -> torch.Tensor:
        return x.relu_()

    def silu(self, x: torch.Tensor) -> torch.Tensor:
        return functional.silu(x)

    def gelu(self, x: torch.Tensor) -> torch.Tensor:
        return functional.gelu(x)

    def tanh(self, x: torch.Tensor) -> torch.Tensor:
        return x.tanh()

    def sigmoid(self, x: torch.Tensor) -> torch.Tensor:
        return x.sigmoid()

    def concatenate(self, *xs: torch.Tensor) -> torch.Tensor:
        return torch.cat(xs, 1)

    def halves(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        first, second = x.chunk(2, 1)
        return first, second

    def at_each_position(self, values: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return values.reshape(*values.shape, *(1,) * (x.ndim - 2))

    def time_embedding(self, x: torch.Tensor, features: int) -> torch.Tensor:
        times = 1000 / x.shape[0] * torch.arange(x.shape[0], device=x.device)
        angles = times[:, None] * 1e-4 ** torch.linspace(0, 1, features // 2, device=x.device)
        return torch.cat([angles.sin(), angles.cos()], 1).to(x.dtype)

    def upsample(self, x: torch.Tensor) -> torch.Tensor:
        return functional.interpolate(x, scale_factor=2, mode="nearest")

    def max_pool(self, x: torch.Tensor, size: int, stride: int, padding: int = 0) -> torch.Tensor:
        pool = {4: functional.max_pool2d, 5: functional.max_pool3d}[x.ndim]
        return pool(x, size, stride, padding)

    def mean(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean(tuple(range(2, x.ndim)))


def activations(array: jax.Array, device: str) -> torch.Tensor:
    """[N, ..., C], on at least two spatial axes, as a view [N, C, ...]."""
    x = _tensor(array, device)
    return (x.unsqueeze(1) if x.ndim == 3 else x).movedim(-1, 1)


def layer(params: Any, device: str) -> Any:
    """The trainable parameters of a layer, in the layout of PyTorch's operations."""

    def parameter(array: jax.Array) -> torch.Tensor:
        t = _tensor(array, device)
        if t.ndim > 2:
            t = t.unsqueeze(0) if t.ndim == 3 else t
            if isinstance(params, ConvTranspose):
                t = _mirrored(t)
            t = t.movedim(_OUTPUTS_INPUTS[type(params)], (0, 1))
            t = t.contiguous(memory_format=torch.channels_last if t.ndim == 4 else torch.channels_last_3d)
        return t.requires_grad_()

    return jax.tree.map(parameter, params)


def to_jax(params: Any, of_layer: Any) -> Any:
    """A layer's parameters in PyTorch, or their gradients, as float32 arrays in the layout of JAX's `params`."""

    def array(like: jax.Array, t: torch.Tensor) -> np.ndarray:
        t = t.detach().float().cpu()
        if t.ndim > 2:
            t = t.movedim((0, 1), _OUTPUTS_INPUTS[type(params)])
            if isinstance(params, ConvTranspose):
                t = _mirrored(t)
        return t.numpy().reshape(like.shape).copy()

    return jax.tree.map(array, params, of_layer)


# The axes of JAX's windows that come first in PyTorch.
_OUTPUTS_INPUTS = {Conv: (-1, -2), ConvTranspose: (-2, -1)}


def _mirrored(w: torch.Tensor) -> torch.Tensor:
    """The window of a transposed convolution is reversed between jax.lax and PyTorch."""
    return w.flip(tuple(range(w.ndim - 2)))


def _tensor(array: jax.Array, device: str) -> torch.Tensor:
    return torch.tensor(np.array(array, np.float32), device=device).to(getattr(torch, array.dtype.name))
