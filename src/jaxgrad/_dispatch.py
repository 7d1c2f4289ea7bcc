"""Which implementation a call takes, and why: decided here, and told by `jaxgrad.explain`."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import jax
from jax import lax

from jaxgrad import _ffi

IMPLEMENTATIONS = (None, "xla", "cpu")


@dataclasses.dataclass(frozen=True)
class Choice:
    """The implementation that one op takes on one platform.

    Attributes:
      op: the op's public name.
      platform: the JAX platform, `"cpu"` or `"gpu"`.
      implementation: `"cpu"` (our kernel) or `"xla"`.
      reason: why, in one sentence.
    """

    op: str
    platform: str
    implementation: str
    reason: str

    def __str__(self) -> str:
        return f"{self.op} on {self.platform}: {self.implementation!r} ({self.reason})"


def choose(op: str, platform: str, implementation: str | None = None) -> Choice:
    """The choice for `op` on `platform`; raises where a forced implementation cannot run there."""
    if implementation == "xla":
        return Choice(op, platform, "xla", "forced by implementation='xla'")
    problem = _ffi.cpu_problem()
    if implementation == "cpu":
        if problem:
            raise RuntimeError(f"jaxgrad.{op}: implementation='cpu' cannot run: {problem}")
        if platform != "cpu":
            raise ValueError(f"jaxgrad.{op}: implementation='cpu' runs on the platform 'cpu' only, got {platform!r}")
        return Choice(op, platform, "cpu", "forced by implementation='cpu'")
    if platform != "cpu":
        return Choice(op, platform, "xla", f"jaxgrad has no {op} kernel for the platform {platform!r}")
    if problem:
        return Choice(op, platform, "xla", f"the CPU kernels are missing: {problem}")
    return Choice(op, platform, "cpu", "the CPU kernel takes every dtype and shape of this op")


@cache
def _warn_once(problem: str) -> None:
    warnings.warn(
        f"jaxgrad runs on plain XLA, without its CPU kernels: {problem}. 'python -m jaxgrad' tells more.",
        RuntimeWarning,
        stacklevel=2,
    )


def by_platform(implementation: str | None, kernel: Callable[..., Any], xla: Callable[..., Any], *args: Any) -> Any:
    """Calls `kernel` where the CPU kernel is chosen and `xla` elsewhere.

    The platform is that of the computation, known when it is lowered, and not that of JAX's default device: a
    program lowered for a GPU from a machine without one takes the GPU's branch.
    """
    problem = _ffi.cpu_problem()
    if implementation == "xla" or (implementation is None and problem):
        if implementation is None and jax.default_backend() == "cpu":
            _warn_once(problem)
        return xla(*args)
    if implementation == "cpu":
        choose("op", "cpu", "cpu")
        return kernel(*args)
    return lax.platform_dependent(*args, cpu=kernel, default=xla)


def explain(op: Callable[..., Any], *args: Any, platform: str | None = None, **kwargs: Any) -> Choice:
    """Says which implementation a call takes, without running it.

    Args:
      op: a public op, such as `jaxgrad.gru`.
      *args: the call's arguments; arrays may be `jax.ShapeDtypeStruct`. With none given, the usual case is told.
      platform: the platform to ask about; by default that of JAX's default device.
      **kwargs: the call's keyword arguments, `implementation` among them.

    Returns:
      A `Choice`, which prints as a sentence.

    Raises:
      ValueError, TypeError: as the call itself would.
      RuntimeError: the forced implementation is not available here.

    Example:
      >>> print(jaxgrad.explain(jaxgrad.gru, x, w, r))
    """
    name = getattr(op, "__name__", "")
    if name not in OPS:
        raise ValueError(f"jaxgrad.explain: op must be one of jaxgrad's ops ({', '.join(OPS)}), got {op!r}")
    if args:
        arrays = {key: value for key, value in kwargs.items() if hasattr(value, "shape")}
        settings = {key: value for key, value in kwargs.items() if key not in arrays}
        jax.eval_shape(lambda args, arrays: op(*args, **arrays, **settings), args, arrays)
    return choose(name, platform or jax.default_backend(), kwargs.get("implementation"))


OPS = ("batch_norm_training", "batch_norm_inference", "gru")
