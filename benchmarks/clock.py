"""The seconds of one run, by the host's clock or between two events of a GPU. Does not import JAX."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any


def host_seconds(run: Callable[[], Any]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def timed(what: str, function: Callable[[], Any]) -> Any:
    """The function's result; prints how long it took."""
    start = time.perf_counter()
    found = function()
    print(f"  {what} after {time.perf_counter() - start:.1f} s", flush=True)
    return found


def torch_gpu_seconds(run: Callable[[], Any]) -> float:
    """Of what `run` puts on PyTorch's stream."""
    import torch

    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    before.record()
    run()
    after.record()
    after.synchronize()
    return before.elapsed_time(after) / 1e3
