"""The passes of a call in PyTorch. Importing this module imports PyTorch, which jaxgrad does not require."""

from __future__ import annotations

import dataclasses
import importlib
import os
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jaxgrad._src.bench.call import Call
from jaxgrad._src.bench.conv import ConvCall
from jaxgrad._src.bench.gru import GruCall
from jaxgrad._src.bench.norm import EPSILON, NormCall
from jaxgrad._src.tuning.timing import Program

torch: Any = importlib.import_module("torch")

_GRAPH_CALLS = 8  # in a CUDA graph, so that starting it does not count
_Passes = dict[str, Callable[[], Any]]


def version() -> str:
    return torch.__version__


def unavailable() -> str:
    """Why PyTorch cannot run on the device of JAX; empty if it can."""
    on_gpu = jax.default_backend() == "gpu"
    return "this PyTorch sees no GPU" if on_gpu and not torch.cuda.is_available() else ""


def device(*, allow_tf32: bool = True) -> str:
    """That of JAX. PyTorch is set up to compute there as JAX does: with as many threads, and by default in TF32."""
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    torch.backends.cudnn.benchmark = True
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = allow_tf32
    return "cuda" if jax.default_backend() == "gpu" else "cpu"


def tensor(array: Any, device: str) -> Any:
    return torch.from_numpy(np.array(array, np.float32)).to(device, getattr(torch, array.dtype.name))


def functions(call: Call, operands: Sequence[jax.Array], *, allow_tf32: bool = True) -> _Passes:
    """The passes of a call by name, as functions without arguments.

    Raises:
      ValueError: PyTorch has no such call.
    """
    of_jax = device(allow_tf32=allow_tf32)
    tensors = [tensor(array, of_jax) for array in operands]
    if isinstance(call, ConvCall):
        return _conv(call, *tensors)
    if isinstance(call, NormCall):
        return _norm(call, *tensors)
    assert isinstance(call, GruCall)
    return _gru(call, *tensors)


def program(function: Callable[[], Any]) -> Program:
    """On a CPU a call, on a GPU a CUDA graph of several, which the GPU times."""
    if jax.default_backend() != "gpu":
        return Program(function)
    return _OnGpu(cuda_graph(function, _GRAPH_CALLS).replay, _GRAPH_CALLS)


def cuda_graph(function: Callable[[], Any], calls: int) -> Any:
    """A graph of so many calls of a function."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # a graph records only what ran on another stream before
        for _ in range(3):
            function()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    # By default calls of other threads that a recording forbids, such as JAX's, fail, and break JAX's stream for good.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(calls):
            function()
    return graph


@dataclasses.dataclass(frozen=True)
class _OnGpu(Program):
    def seconds(self, times: int) -> float:
        return gpu_seconds(self.run, times)


def gpu_seconds(run: Callable[[], Any], times: int = 1) -> float:
    """Of what so many runs put on PyTorch's stream, between two events."""
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    before.record()
    for _ in range(times):
        run()
    after.record()
    after.synchronize()
    return before.elapsed_time(after) / 1e3


def _conv(call: ConvCall, x: Any, w: Any, dy: Any) -> _Passes:
    n = len(call.spatial)
    if call.channels_last:
        x, dy, w = x.movedim(-1, 1), dy.movedim(-1, 1), w.movedim((-1, -2), (0, 1))
    if call.transposed:
        w = _transposed_weights(call, w)
    memory = {2: torch.channels_last, 3: torch.channels_last_3d}.get(n) if call.channels_last else None
    layout = {"memory_format": memory or torch.contiguous_format}
    x, dy, w = (tensor.contiguous(**layout) for tensor in (x, dy, w))
    if call.transposed:
        return _conv_transpose(call, x, w, dy)
    alike = all(low == high for low, high in call.pads)
    before = [0] * n if alike else [low for low, _ in call.pads]

    def padded() -> Any:
        """PyTorch pads both ends alike. With other padding it reads a padded copy, which the weight gradient reuses."""
        flat = [size for pads in reversed(call.pads) for size in pads]
        return x if alike else torch.nn.functional.pad(x, flat)

    kept, own = padded(), tuple(low for low, _ in call.pads) if alike else (0,) * n
    settings = (call.stride, own, call.dilation, False, (0,) * n, call.groups)

    def input_gradient() -> Any:
        dx = _backward(dy, kept, w, settings, 0)
        for axis, (start, size) in enumerate(zip(before, call.spatial, strict=True), start=2):
            dx = dx.narrow(axis, start, size)
        return dx

    return {
        "forward": lambda: torch.convolution(padded(), w, None, *settings),
        "input gradient": input_gradient,
        "weight gradient": lambda: _backward(dy, kept, w, settings, 1),
    }


def _conv_transpose(call: ConvCall, x: Any, w: Any, dy: Any) -> _Passes:
    """PyTorch's padding cuts both ends alike. Where more is cut at the high end, a view of the result is taken."""
    own = tuple(low for low, _ in call.pads)
    added = tuple(max(0, low - high) for low, high in call.pads)
    limits = map(max, call.stride, call.dilation)
    if min(own) < 0 or any(size >= limit for size, limit in zip(added, limits, strict=True)):
        raise ValueError(f"PyTorch has no transposed convolution with the padding {call.pads}")
    cut = [max(0, high - low) for low, high in call.pads]
    settings = (call.stride, own, call.dilation, True, added, call.groups)

    def forward() -> Any:
        y = torch.convolution(x, w, None, *settings)
        for axis, size in enumerate(call.out_spatial, start=2):
            y = y.narrow(axis, 0, size)
        return y

    def whole_dy() -> Any:
        return torch.nn.functional.pad(dy, [s for size in reversed(cut) for s in (0, size)]) if any(cut) else dy

    return {
        "forward": forward,
        "input gradient": lambda: _backward(whole_dy(), x, w, settings, 0),
        "weight gradient": lambda: _backward(whole_dy(), x, w, settings, 1),
    }


def _transposed_weights(call: ConvCall, w: Any) -> Any:
    """From output and input features of a group to PyTorch's input and output features, with the window reversed."""
    grouped = w.reshape(call.groups, w.shape[0] // call.groups, *w.shape[1:]).transpose(1, 2)
    return grouped.flatten(0, 1).flip(tuple(range(2, w.ndim)))


def _backward(dy: Any, x: Any, w: Any, settings: tuple[Any, ...], which: int) -> Any:
    wanted = [which == index for index in range(3)]
    return torch.ops.aten.convolution_backward(dy, x, w, None, *settings, wanted)[which]


def _norm(call: NormCall, x: Any, scale: Any, *others: Any) -> _Passes:
    """`others` are the bias, which RMS norm does not have, and dy, with a residual before it in the benchmarks of the
    checkout."""
    bias, *like_x = (None, *others) if call.kind == "rms-norm" else others
    if call.kind in ("batch-norm", "group-norm"):
        x, *like_x = (tensor.movedim(call.feature_axis, 1) for tensor in (x, *like_x))
    *residual, dy = like_x
    inputs = [tensor.requires_grad_() for tensor in (x, scale, bias, *residual) if tensor is not None]
    of_torch = torch.nn.functional

    def forward() -> Any:
        if call.kind == "batch-norm":
            y = of_torch.batch_norm(x, None, None, scale, bias, training=True, eps=EPSILON)
        elif call.kind == "group-norm":
            y = of_torch.group_norm(x, call.groups, scale, bias, eps=EPSILON)
        elif call.kind == "layer-norm":
            y = of_torch.layer_norm(x, scale.shape, scale, bias, eps=EPSILON)
        else:
            y = of_torch.rms_norm(x, scale.shape, scale, eps=EPSILON)
        y = y + residual[0] if residual else y
        if call.activation == "gelu":
            return of_torch.gelu(y, approximate="tanh")
        return getattr(of_torch, call.activation)(y) if call.activation else y

    return _with_gradients(forward, inputs, dy)


def _gru(call: GruCall, x: Any, w: Any, r: Any, b: Any, initial_h: Any, dy: Any, dy_h: Any) -> _Passes:
    if not call.linear_before_reset:
        raise ValueError("PyTorch has no GRU with linear_before_reset=false")
    module = torch.nn.GRU(call.I, call.H, bidirectional=call.bidirectional, device=x.device, dtype=x.dtype)
    H = call.H
    with torch.no_grad():
        for parameters, w_d, r_d, b_d in zip(module.all_weights, w, r, b, strict=True):
            for parameter, ours in zip(parameters, (w_d, r_d, b_d[: 3 * H], b_d[3 * H :]), strict=True):
                z, reset, new = ours.split(H)
                parameter.copy_(torch.cat([reset, z, new]))
    inputs = [tensor.requires_grad_() for tensor in (x, initial_h)] + list(module.parameters())
    return _with_gradients(lambda: module(x, initial_h), inputs, (dy.transpose(1, 2).flatten(2), dy_h))


def _with_gradients(forward: Callable[[], Any], inputs: Sequence[Any], cotangents: Any) -> _Passes:
    def without_gradients() -> Any:
        with torch.no_grad():
            return forward()

    def with_gradients() -> Any:
        y = forward()
        return y, torch.autograd.grad(y, inputs, cotangents)

    return {"forward": without_gradients, "forward + backward": with_gradients}
