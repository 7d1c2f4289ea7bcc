"""The peer in PyTorch: aten's convolution and its backward, on arrays with the same layout in memory."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
import torch
from torch.nn import functional

if TYPE_CHECKING:
    from benchmarks.conv_cases import Case


def passes(
    case: Case, x: jax.Array, w: jax.Array, dy: jax.Array, *, on_gpu: bool
) -> dict[str, tuple[Callable[[], Any], Callable[[Callable[[], Any]], list[np.ndarray]]]]:
    """For "forward", "dX" and "dW": the function to time, and one that calls it for its outputs in jaxgrad's layout."""
    n = len(case.spatial)
    to_numpy, to_torch = _activations(case.channels_last)
    weights_to_numpy, weights_to_torch = _weights(case)
    device = "cuda" if on_gpu else "cpu"
    torch.backends.cudnn.benchmark = True
    torch.backends.cudnn.allow_tf32 = True

    def tensor(array: jax.Array, arrange: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        found = arrange(torch.tensor(np.array(array, np.float32))).to(device, getattr(torch, case.dtype))
        return found if case.channels_last else found.contiguous()

    x_t, dy_t, w_t = tensor(x, to_torch), tensor(dy, to_torch), tensor(w, weights_to_torch)
    if case.channels_last and n > 1:
        w_t = w_t.contiguous(memory_format=torch.channels_last if n == 2 else torch.channels_last_3d)
    before = case.dilation * (case.window - 1) if case.causal else 0

    def padded(t: torch.Tensor) -> torch.Tensor:
        """PyTorch pads both ends alike. A causal convolution reads a padded copy, which dW reuses."""
        return functional.pad(t, (before, 0) * n) if before else t

    kept = padded(x_t)
    settings = (
        (case.stride,) * n,
        (case.padding,) * n,
        (case.dilation,) * n,
        case.transposed,
        (0,) * n,
        case.groups,
    )

    def backward(which: int) -> torch.Tensor:
        needs_grad = [which == i for i in range(3)]
        return torch.ops.aten.convolution_backward(dy_t, kept, w_t, None, *settings, needs_grad)[which]

    def input_gradient() -> torch.Tensor:
        found = backward(0)
        for axis, size in enumerate(case.spatial, start=2):
            found = found.narrow(axis, before, size)
        return found

    def outputs(
        arrange: Callable[[torch.Tensor], torch.Tensor], function: Callable[[], torch.Tensor]
    ) -> list[np.ndarray]:
        return [arrange(function().float().cpu()).numpy()]

    functions: dict[str, tuple[Callable[[], torch.Tensor], Callable[[torch.Tensor], torch.Tensor]]] = {
        "forward": (lambda: torch.convolution(padded(x_t), w_t, None, *settings), to_numpy),
        "dX": (input_gradient, to_numpy),
        "dW": (lambda: backward(1), weights_to_numpy),
    }
    return {which: (function, partial(outputs, arrange)) for which, (function, arrange) in functions.items()}


_Arrange = Callable[[torch.Tensor], torch.Tensor]


def _activations(channels_last: bool) -> tuple[_Arrange, _Arrange]:
    """From PyTorch's order of axes to jaxgrad's, and back, as views."""
    if not channels_last:
        return (lambda t: t), (lambda t: t)
    return (lambda t: t.movedim(1, -1)), (lambda t: t.movedim(-1, 1))


def _weights(case: Case) -> tuple[_Arrange, _Arrange]:
    """The same for weights. PyTorch has O, I, window; for a transposed convolution I, O and the reversed window."""
    window = tuple(range(2, len(case.spatial) + 2))

    def ours(t: torch.Tensor) -> torch.Tensor:
        if case.transposed:
            t = t.transpose(0, 1).flip(window)
        return t.permute(*window, 1, 0) if case.channels_last else t

    def theirs(t: torch.Tensor) -> torch.Tensor:
        if case.channels_last:
            t = t.movedim((-1, -2), (0, 1))
        return t.flip(window).transpose(0, 1) if case.transposed else t

    return ours, theirs
