"""The contenders of PyTorch: which can run here and why the others are left out, torch.compile, and single calls."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from importlib.util import find_spec
from typing import Any

import jax
import numpy as np

from benchmarks.contender_names import TORCH_COMPILED
from benchmarks.options import Options
from benchmarks.timing import Contender
from benchmarks.wording import brief
from jaxgrad._src.bench.call import Call
from jaxgrad._src.bench.conv import ConvCall
from jaxgrad._src.bench.gru import GruCall
from jaxgrad._src.bench.norm import NormCall

# The measures of the passes of `python -m jaxgrad bench`.
MEASURES = {"input gradient": "dX", "weight gradient": "dW", "forward + backward": "forward+backward"}
_Passes = dict[str, tuple[Callable[[], Any], Callable[[Callable[[], Any]], list[np.ndarray]]]]


def left_out(names: tuple[str, ...], options: Options) -> dict[str, str]:
    """Of PyTorch's selected contenders, those that cannot run, each with the reason."""
    selected = [name for name in names if options.wants(name)]
    if find_spec("torch") is None:
        return dict.fromkeys(selected, "torch is not installed")
    from jaxgrad._src.bench import torch_calls

    if reason := torch_calls.unavailable():
        return dict.fromkeys(selected, reason)
    if TORCH_COMPILED in selected and (reason := _why_not_compiled()):
        return {TORCH_COMPILED: f"torch.compile does not work here: {reason}"}
    return {}


@cache
def _why_not_compiled() -> str:
    """It needs a C++ compiler on a CPU, Triton and a C compiler on a GPU: a small function is compiled and called."""
    import torch

    try:
        compiled(lambda x: (2 * x + 1).relu())(
            torch.ones(8, device="cuda" if jax.default_backend() == "gpu" else "cpu")
        )
    except Exception as error:  # any error of a compiler
        return brief(error)
    return ""


def compiled(function: Callable[..., Any], *, fullgraph: bool = True) -> Callable[..., Any]:
    """The function for fixed shapes, in the default mode. With `fullgraph` as one graph, or an error."""
    import torch

    return torch.compile(function, fullgraph=fullgraph, dynamic=False)


def forget() -> None:
    """Drops all compiled code: PyTorch compiles one function for a few shapes only, and then raises an error."""
    import torch

    torch._dynamo.reset()


def compiled_contender(
    make: Callable[[], Contender], where: str, options: Options, missing: dict[str, str]
) -> Contender | None:
    """The contender; None where compiling fails or takes too long, and the reason in `missing`."""
    start = time.perf_counter()
    try:
        with _time_limit(options.compile_seconds):
            return make()
    except Exception as error:  # any error of a compiler
        # The compiler may turn the TimeoutError into an error of its own.
        late = time.perf_counter() - start > options.compile_seconds
        reason = f"not compiled within {options.compile_seconds:.0f} s" if late else brief(error)
        missing[f"{TORCH_COMPILED}, of {where}"] = reason
        print(f"  left out: {TORCH_COMPILED} ({reason})", flush=True)
        return None


@contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """Raises TimeoutError in the main thread after some seconds, and again each second: a compiler may catch it."""

    def stop(*_: Any) -> None:
        raise TimeoutError(f"compiling took more than {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds, 1)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def passes(call: Call, operands: Sequence[jax.Array], *, allow_tf32: bool = True) -> _Passes:
    """By measure, the function to time, and one that calls it for its outputs in jaxgrad's order and layout."""
    from jaxgrad._src.bench import torch_calls

    def outputs(name: str, function: Callable[[], Any]) -> list[np.ndarray]:
        return list(_in_layout_of_jaxgrad(call, name, [numpy_of(each) for each in jax.tree.leaves(function())]))

    functions = torch_calls.functions(call, operands, allow_tf32=allow_tf32)
    return {MEASURES.get(name, name): (each, partial(outputs, name)) for name, each in functions.items()}


def _in_layout_of_jaxgrad(call: Call, name: str, found: list[np.ndarray]) -> Iterator[np.ndarray]:
    if isinstance(call, ConvCall):
        (array,) = found
        if name == "weight gradient" and call.transposed:  # PyTorch has I, O and the reversed window; without groups
            array = np.flip(array.swapaxes(0, 1), range(2, array.ndim))
        if call.channels_last:
            array = np.moveaxis(array, (0, 1), (-1, -2)) if name == "weight gradient" else np.moveaxis(array, 1, -1)
        yield array
    elif isinstance(call, NormCall) and call.kind in ("layer-norm", "rms-norm"):
        yield from found
    elif isinstance(call, NormCall):
        yield from (np.moveaxis(array, 1, call.feature_axis) if array.ndim > 1 else array for array in found)
    elif isinstance(call, GruCall):
        D = 1 + call.bidirectional
        if name == "forward":
            yield from (found[0].reshape(call.T, call.B, D, call.H).swapaxes(1, 2), found[1])
            return
        _, _, dx, dh, *weights = found
        dw, dr, dwb, drb = (np.stack([swap_z_and_r(each) for each in weights[i::4]]) for i in range(4))
        yield from (dx, dw, dr, np.concatenate([dwb, drb], 1), dh)


def swap_z_and_r(array: np.ndarray) -> np.ndarray:
    """Between our gate order, z r h, and PyTorch's, r z n, along the first axis."""
    z, r, h = np.split(array, 3)
    return np.concatenate([r, z, h])


def numpy_of(tensor: Any) -> np.ndarray:
    return tensor.detach().float().cpu().numpy().copy()


def peak_bytes(step: Callable[[], Any]) -> int | None:
    """Of the third step on a GPU: in the first, cudnn.benchmark tries kernels with large workspaces."""
    import torch

    if jax.default_backend() != "gpu":
        return None
    step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated()
