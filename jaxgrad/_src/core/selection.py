"""Which implementation a call takes, and why: decided here, and told by `jaxgrad.explain`."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any

import jax
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import mlir

from jaxgrad import _checks

IMPLEMENTATIONS = (None, "xla", "cpu", "cudnn", "cuda")

# The JAX platform that the kernels of an implementation run on, and its name where a program is lowered for it.
PLATFORM = {"cpu": "cpu", "cudnn": "gpu", "cuda": "gpu"}
_LOWERED_FOR = {"cpu": "cpu", "cudnn": "cuda", "cuda": "cuda"}


@dataclasses.dataclass(frozen=True)
class Forced:
    """The kernels that a call's `implementation` asks for: nothing may stand in for them."""

    op: str
    implementation: str

    def check(self, platform: str) -> None:
        """Raises where they do not run on the platform, JAX's or the one that a program is lowered for."""
        own, given = PLATFORM[self.implementation], "gpu" if platform == "cuda" else platform
        if given != own:
            raise ValueError(
                f"jaxgrad.{self.op}: implementation={self.implementation!r} runs on the platform {own!r} only, "
                f"got {given!r}"
            )


@dataclasses.dataclass(frozen=True)
class Route:
    """What one unit of a call may run on, known while it is traced.

    Attributes:
      kernels: the implementations whose kernels it takes, each on its own platform, and of those on one platform the
        first; XLA does the rest.
      forced: what the call forces, if anything: `kernels` then holds it alone, or nothing where it has no kernel for
        the unit.
    """

    kernels: tuple[str, ...] = ()
    forced: Forced | None = None

    def without(self, implementation: str) -> Route:
        """The route once it turns out that one of the kernels cannot take the call; a forced one must."""
        if self.forced:
            return self
        return Route(tuple(name for name in self.kernels if name != implementation))

    def on_xla(self) -> Route:
        """The route of what no kernel computes; a forced implementation keeps the call to its platform."""
        return dataclasses.replace(self, kernels=())


XLA = Route()


@dataclasses.dataclass(frozen=True)
class UnitChoice:
    """The implementation that one unit of an op takes: its value or one of its gradients."""

    unit: str
    implementation: str
    reason: str

    def __str__(self) -> str:
        return f"{self.unit}: {self.implementation!r} ({self.reason})"


@dataclasses.dataclass(frozen=True)
class Choice:
    """The implementation that one op takes on one platform.

    Attributes:
      op: the op's public name.
      platform: the JAX platform, `"cpu"` or `"gpu"`.
      implementation: `"cpu"` (the kernels of jaxgrad or oneDNN), `"cudnn"`, `"cuda"` (jaxgrad's own kernels) or
        `"xla"`: that of the op's value.
      reason: why, in one sentence.
      units: the choice for the value and for each gradient, where they are not all the same.
    """

    op: str
    platform: str
    implementation: str
    reason: str
    units: tuple[UnitChoice, ...] = ()

    def __str__(self) -> str:
        if self.units:
            return f"{self.op} on {self.platform}: {'; '.join(map(str, self.units))}"
        return f"{self.op} on {self.platform}: {self.implementation!r} ({self.reason})"


@dataclasses.dataclass(frozen=True)
class Obstacle:
    """Why a kernel cannot, or should not, take a call."""

    reason: str
    missing: str = ""  # what is missing, where the kernel could run but for that: the user should hear of it
    slower: bool = False  # it can take the call, but XLA is faster


# What stands in the way of each implementation in each unit of one call.
Obstacles = Mapping[tuple[str, str], Obstacle | None]
# What is to be told of each implementation in each unit of one call, where the unit takes it.
Notes = Mapping[tuple[str, str], str]


def symbolic_obstacle(*arrays: jax.Array | None) -> Obstacle | None:
    """Sizes that are symbols, as in shape-polymorphic export: no workspace can be planned for them."""
    symbolic = any(not isinstance(size, int) for array in arrays if array is not None for size in array.shape)
    return Obstacle("sizes that are known only later are XLA's") if symbolic else None


@dataclasses.dataclass(frozen=True)
class Kernel:
    """The kernels that an op has in one implementation.

    Attributes:
      implementation: "cpu", "cudnn" or "cuda".
      description: what they are, for the explanation.
      problem: says why they cannot be used at all; empty when they can.
      title: what they are called where they are missing.
      units: those of the op that they compute; None for all.
      instead: what the op runs on where they are missing.
    """

    implementation: str
    description: str
    problem: Callable[[], str]
    title: str
    units: tuple[str, ...] | None = None
    instead: str = "plain XLA"

    def has(self, unit: str) -> bool:
        return self.units is None or unit in self.units


def cpu_kernel(description: str, problem: Callable[[], str]) -> Kernel:
    return Kernel("cpu", description, problem, "CPU kernels")


@dataclasses.dataclass(frozen=True)
class Decision:
    """What one call comes to, on every platform and in each of its units."""

    op: Op
    implementation: str | None
    obstacles: Obstacles
    notes: Notes

    @property
    def route(self) -> Route:
        """That of the op's value."""
        return self.routes[self.op.units[0]]

    @property
    def routes(self) -> dict[str, Route]:
        """By unit."""
        return {unit: self._route(unit) for unit in self.op.units}

    def _route(self, unit: str) -> Route:
        if self.implementation == "xla":
            return XLA
        kernels = [kernel for kernel in self.op.kernels if kernel.has(unit)]
        if self.implementation is not None:
            taken = tuple(kernel.implementation for kernel in kernels if kernel.implementation == self.implementation)
            return Route(taken, Forced(self.op.name, self.implementation))
        return Route(tuple(k.implementation for k in kernels if self.obstacles.get((k.implementation, unit)) is None))

    def choice(self, platform: str) -> Choice:
        """Raises where a forced implementation cannot run on `platform`."""
        platform = "gpu" if platform == "cuda" else platform
        units = tuple(UnitChoice(unit, *self._unit_choice(unit, platform)) for unit in self.op.units)
        alike = len({(unit.implementation, unit.reason) for unit in units}) == 1
        return Choice(self.op.name, platform, units[0].implementation, units[0].reason, () if alike else units)

    def _unit_choice(self, unit: str, platform: str) -> tuple[str, str]:
        forced = self.implementation
        if forced is not None:
            if forced != "xla":
                Forced(self.op.name, forced).check(platform)
                if not self.op.kernel(forced).has(unit):
                    return "xla", f"implementation={forced!r} has no kernel for this unit"
            return forced, self._noted(f"forced by implementation={forced!r}", forced, unit)
        reason, missing = f"jaxgrad has no {self.op.name} kernel for the platform {platform!r}", ""
        for kernel in self.op.kernels:
            if PLATFORM[kernel.implementation] != platform or not kernel.has(unit):
                continue
            obstacle = self.obstacles.get((kernel.implementation, unit))
            if obstacle is None:
                return kernel.implementation, self._noted(kernel.description, kernel.implementation, unit) + missing
            reason = obstacle.reason + missing
            missing += f"; {obstacle.reason}" if obstacle.missing else ""
        return "xla", reason

    def _noted(self, reason: str, implementation: str, unit: str) -> str:
        note = self.notes.get((implementation, unit))
        return f"{reason}; {note}" if note else reason


@dataclasses.dataclass(frozen=True)
class Op:
    """A public op, as the dispatch knows it.

    Attributes:
      name: its public name.
      kernels: the kernels that it has, of those on one platform the preferred ones first.
      units: what a call and its gradients are made of, each routed by itself; the first computes the op's value.
      usual: what stands in the way of single kernels in the usual case, which `explain` tells without arguments.
    """

    name: str
    kernels: tuple[Kernel, ...]
    units: tuple[str, ...] = ("call",)
    usual: Obstacles = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        OPS[self.name] = self

    def kernel(self, implementation: str) -> Kernel:
        return next(kernel for kernel in self.kernels if kernel.implementation == implementation)

    def decide(
        self,
        implementation: str | None,
        obstacle: Obstacle | None = None,
        obstacles: Obstacles | None = None,
        notes: Notes | None = None,
    ) -> Decision:
        """The decision for a call; raises where a forced implementation cannot take it.

        Args:
          implementation: as the call has it.
          obstacle: what stands in the way of every kernel, if anything.
          obstacles: what stands in the way of single ones.
          notes: what `explain` is to tell beside the reasons.
        """
        found: dict[tuple[str, str], Obstacle | None] = {}
        for kernel in self.kernels:
            problem = kernel.problem()
            missing = Obstacle(f"the {kernel.title} are missing: {problem}", missing=problem) if problem else None
            for unit in filter(kernel.has, self.units):
                key = (kernel.implementation, unit)
                found[key] = missing or obstacle or (obstacles or {}).get(key)
        if implementation not in (None, "xla"):
            self._check_forced(implementation, found)
        decision = Decision(self, implementation, found, notes or {})
        _note(decision)
        return decision

    def _check_forced(self, implementation: str, obstacles: Obstacles) -> None:
        cannot = f"jaxgrad.{self.name}: implementation={implementation!r} cannot run:"
        if all(kernel.implementation != implementation for kernel in self.kernels):
            raise ValueError(f"{cannot} there are no such kernels of this op")
        for unit in filter(self.kernel(implementation).has, self.units):
            obstacle = obstacles[implementation, unit]
            if obstacle is not None and not obstacle.slower:
                raise (RuntimeError if obstacle.missing else ValueError)(f"{cannot} {obstacle.reason}")


OPS: dict[str, Op] = {}
_explaining = threading.local()


def _note(decision: Decision) -> None:
    if (recorded := getattr(_explaining, "decisions", None)) is not None:
        recorded.append(decision)
    elif decision.implementation is None:
        for kernel in decision.op.kernels:
            obstacles = (decision.obstacles.get((kernel.implementation, unit)) for unit in decision.op.units)
            missing = next((o.missing for o in obstacles if o is not None and o.missing), "")
            if missing and jax.default_backend() == PLATFORM[kernel.implementation]:
                _warn_once(kernel, missing)


@cache
def _warn_once(kernel: Kernel, problem: str) -> None:
    warnings.warn(
        f"jaxgrad runs on {kernel.instead}, without its {kernel.title}: {problem}. 'python -m jaxgrad' tells more.",
        RuntimeWarning,
        stacklevel=2,
    )


def by_platform(route: Route, kernels: Mapping[str, Callable[..., Any]], xla: Callable[..., Any], *args: Any) -> Any:
    """Calls the kernel that the route takes on the platform of the computation, and `xla` where it takes none.

    The platform is known when the computation is lowered, and is not that of JAX's default device: a program lowered
    for a GPU from a machine without one takes the GPU's branch.

    Args:
      route: of `Decision`.
      kernels: by implementation, what to call; at least those that the route takes.
      xla: what to call on every other platform.
      *args: the operands, arrays or None.
    """
    args = on_forced_platform(route, args)
    taken: dict[str, Callable[..., Any]] = {}
    for name in route.kernels:
        taken.setdefault(_LOWERED_FOR[name], kernels[name])
    if not taken:
        return xla(*args)
    if route.forced:
        (kernel,) = taken.values()
        return kernel(*args)
    return lax.platform_dependent(*args, **taken, default=xla)


def on_forced_platform(route: Route, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The operands of a unit, the first of them an array, such that lowering for any platform but that of a forced
    implementation raises. Handlers of several platforms share a name: without this the program would call another
    platform's, which fails on the attributes when it runs, and says nothing of the cause."""
    if route.forced is None:
        return args
    return _on_forced_platform_p.bind(args[0], forced=route.forced), *args[1:]


_on_forced_platform_p = Primitive("jaxgrad_on_forced_platform")


@_on_forced_platform_p.def_abstract_eval
def _same(aval, *, forced):
    return aval


@_on_forced_platform_p.def_impl
def _checked(array, *, forced):
    for device in array.devices():
        forced.check(device.platform)
    return array


def _lowered_for(platform: str) -> Callable[..., Any]:
    def lowered(ctx, array, *, forced):
        forced.check(platform)
        return [array]

    return lowered


for _platform in ("cpu", "cuda", "rocm", "tpu"):
    mlir.register_lowering(_on_forced_platform_p, _lowered_for(_platform), platform=_platform)


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
            return OPS[name].decide(implementation, obstacles=OPS[name].usual).choice(platform)
    # Only arrays without values are traced: the call checks the values of the others as it always does.
    given: dict[str, Any] = {**{str(i): value for i, value in enumerate(args)}, **kwargs}
    specs = {key: value for key, value in given.items() if isinstance(value, jax.ShapeDtypeStruct)}

    def call(arrays: dict[str, Any]) -> Any:
        both = {**given, **arrays}
        return op(*(both[str(i)] for i in range(len(args))), **{key: both[key] for key in kwargs})

    with _recording() as decisions:
        jax.eval_shape(call, specs)
    return decisions[0].choice(platform)
