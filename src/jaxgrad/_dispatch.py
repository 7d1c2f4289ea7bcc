"""Which implementation a call takes, and why: decided here, and told by `jaxgrad.explain`."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import warnings
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, Literal

import jax
from jax import lax

from jaxgrad import _checks

IMPLEMENTATIONS = (None, "xla", "cpu")

Route = Literal["by platform", "kernel", "xla"]


@dataclasses.dataclass(frozen=True)
class Choice:
    """The implementation that one op takes on one platform.

    Attributes:
      op: the op's public name.
      platform: the JAX platform, `"cpu"` or `"gpu"`.
      implementation: `"cpu"` (the kernels of jaxgrad or oneDNN) or `"xla"`.
      reason: why, in one sentence.
    """

    op: str
    platform: str
    implementation: str
    reason: str

    def __str__(self) -> str:
        return f"{self.op} on {self.platform}: {self.implementation!r} ({self.reason})"


@dataclasses.dataclass(frozen=True)
class Obstacle:
    """Why the CPU kernels cannot, or should not, take a call."""

    reason: str
    missing: str = ""  # what is missing, where the kernels could run but for that: the user should hear of it
    slower: bool = False  # they can take it, but XLA is faster


def symbolic_obstacle(*arrays: jax.Array | None) -> Obstacle | None:
    """Sizes that are symbols, as in shape-polymorphic export: no workspace can be planned for them."""
    symbolic = any(not isinstance(size, int) for array in arrays if array is not None for size in array.shape)
    return Obstacle("sizes that are known only later are XLA's") if symbolic else None


@dataclasses.dataclass(frozen=True)
class Decision:
    """What one call comes to, on every platform."""

    op: str
    implementation: str | None
    obstacle: Obstacle | None
    kernel: str  # what the CPU kernel is, for the explanation

    @property
    def route(self) -> Route:
        if self.implementation == "xla":
            return "xla"
        if self.implementation == "cpu":
            return "kernel"
        return "xla" if self.obstacle else "by platform"

    def choice(self, platform: str) -> Choice:
        """Raises where a forced implementation cannot run on `platform`."""
        if self.implementation == "xla":
            return Choice(self.op, platform, "xla", "forced by implementation='xla'")
        if self.implementation == "cpu":
            if platform != "cpu":
                raise ValueError(
                    f"jaxgrad.{self.op}: implementation='cpu' runs on the platform 'cpu' only, got {platform!r}"
                )
            return Choice(self.op, platform, "cpu", "forced by implementation='cpu'")
        if platform != "cpu":
            return Choice(self.op, platform, "xla", f"jaxgrad has no {self.op} kernel for the platform {platform!r}")
        if self.obstacle:
            return Choice(self.op, platform, "xla", self.obstacle.reason)
        return Choice(self.op, platform, "cpu", self.kernel)


@dataclasses.dataclass(frozen=True)
class Op:
    """A public op, as the dispatch knows it.

    Attributes:
      name: its public name.
      kernel: what its CPU kernel is, for the explanation.
      problem: says why the CPU kernels cannot be used at all; empty when they can.
    """

    name: str
    kernel: str
    problem: Callable[[], str]

    def __post_init__(self) -> None:
        OPS[self.name] = self

    def decide(self, implementation: str | None, obstacle: Obstacle | None = None) -> Decision:
        """The decision for a call that meets `obstacle`; raises where `implementation="cpu"` does."""
        if problem := self.problem():
            obstacle = Obstacle(f"the CPU kernels are missing: {problem}", missing=problem)
        if implementation == "cpu" and obstacle is not None and not obstacle.slower:
            error = RuntimeError if obstacle.missing else ValueError
            raise error(f"jaxgrad.{self.name}: implementation='cpu' cannot run: {obstacle.reason}")
        decision = Decision(self.name, implementation, obstacle, self.kernel)
        _note(decision)
        return decision


OPS: dict[str, Op] = {}
_explaining = threading.local()


def _note(decision: Decision) -> None:
    implementation, obstacle = decision.implementation, decision.obstacle
    if (recorded := getattr(_explaining, "decisions", None)) is not None:
        recorded.append(decision)
    elif implementation is None and obstacle is not None and obstacle.missing and jax.default_backend() == "cpu":
        _warn_once(obstacle.missing)


@cache
def _warn_once(problem: str) -> None:
    warnings.warn(
        f"jaxgrad runs on plain XLA, without its CPU kernels: {problem}. 'python -m jaxgrad' tells more.",
        RuntimeWarning,
        stacklevel=2,
    )


def by_platform(route: Route, kernel: Callable[..., Any], xla: Callable[..., Any], *args: Any) -> Any:
    """Calls `kernel` where the CPU kernel is chosen and `xla` elsewhere.

    The platform is that of the computation, known when it is lowered, and not that of JAX's default device: a
    program lowered for a GPU from a machine without one takes the GPU's branch.
    """
    if route == "by platform":
        return lax.platform_dependent(*args, cpu=kernel, default=xla)
    return (kernel if route == "kernel" else xla)(*args)


@contextlib.contextmanager
def _recording() -> Iterator[list[Decision]]:
    _explaining.decisions = []
    try:
        yield _explaining.decisions
    finally:
        _explaining.decisions = None


def explain(op: Callable[..., Any], *args: Any, platform: str | None = None, **kwargs: Any) -> Choice:
    """Says which implementation a call takes, without running it.

    Args:
      op: a public op, such as `jaxgrad.conv_general_dilated`.
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
    platform = platform or jax.default_backend()
    if not args and not any(hasattr(value, "ndim") and value.ndim > 0 for value in kwargs.values()):
        implementation = kwargs.get("implementation")
        _checks.check_choice(f"jaxgrad.{name}", "implementation", implementation, IMPLEMENTATIONS)
        with _recording():
            return OPS[name].decide(implementation).choice(platform)
    # Only arrays without values are traced: the call checks the values of the others as it always does.
    given: dict[str, Any] = {**{str(i): value for i, value in enumerate(args)}, **kwargs}
    specs = {key: value for key, value in given.items() if isinstance(value, jax.ShapeDtypeStruct)}

    def call(arrays: dict[str, Any]) -> Any:
        both = {**given, **arrays}
        return op(*(both[str(i)] for i in range(len(args))), **{key: both[key] for key in kwargs})

    with _recording() as decisions:
        jax.eval_shape(call, specs)
    return decisions[0].choice(platform)
