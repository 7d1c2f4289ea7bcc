"""torch.compile for the contender "torch, compiled": where it works, and for how long it may compile."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch

from benchmarks.wording import brief


@cache
def why_not(device: str) -> str | None:
    """Why torch.compile does not work on "cpu" or "cuda"; None where it works.

    It needs a C++ compiler on a CPU, Triton and a C compiler on a GPU: a small function is compiled and called.
    """
    try:
        compiled(lambda x: (2 * x + 1).relu())(torch.ones(8, device=device))
    except Exception as error:  # any error of a compiler
        return brief(error)
    return None


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """The whole function as one graph for fixed shapes, in the default mode. An error where that is impossible."""
    return torch.compile(function, fullgraph=True, dynamic=False)


def forget() -> None:
    """Drops all compiled code: PyTorch compiles one function for a few shapes only, and then raises an error."""
    torch._dynamo.reset()


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
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
