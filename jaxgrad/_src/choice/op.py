"""The contract between an op and its backends.

An `Op` has passes (its value and its gradients) and backends. A `Backend` is a set of kernels for the passes on one
platform. Backends are asked, call by call, whether they support a pass and whether another backend is faster there;
XLA runs what no backend takes. To add a backend to an op, subclass the op's backend class (such as
`conv.backend.ConvBackend`, which adds a method for each pass) and add an instance to the op's list of backends.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Protocol, TypeVar

from jaxgrad._src.choice import old_names
from jaxgrad._src.core import checks

_Function = TypeVar("_Function", bound=Callable[..., Any])


@dataclasses.dataclass(frozen=True)
class Rejection:
    """Why a backend does not run a pass.

    Attributes:
      reason: one sentence.
      missing: what is not installed, if only that keeps the backend from running the pass. The user is warned of it.
      slower: the backend supports the pass, but XLA or another backend is faster.
      is_asked: whether the backend was asked: it is not where another implementation is the only one that may run.
    """

    reason: str
    missing: str = ""
    slower: bool = False
    is_asked: bool = True


class Preference(Protocol):
    """A row of a table of preferences: `prefer` names the fastest implementation, `why` says why in one sentence."""

    @property
    def prefer(self) -> str: ...

    @property
    def why(self) -> str: ...


class Backend:
    """Kernels for all passes of one op on one platform.

    `call` below is the op's description of one call: its problem and its parameters.

    Attributes:
      implementation: the value of the argument `implementation=` that forces this backend.
      platform: the platform of the kernels, as JAX names it when a program is lowered: "cpu" or "cuda".
      title: the kernels' name in messages, in the plural.
      description: why the backend is selected, for `jaxgrad.explain`.
      instead: what runs where the kernels are missing, for the warning.
      depends_on_problem_only: whether the answers about a convolution depend only on its problem, on `has_bias` and on
        `transposed`, so that they may be kept: not on settings, precision or relu, nor on free memory. The table of
        the machine does not change while a process runs.
    """

    implementation: ClassVar[str]
    platform: ClassVar[str]
    title: ClassVar[str]
    description: ClassVar[str]
    instead: ClassVar[str] = "XLA"
    depends_on_problem_only: ClassVar[bool] = False

    def unavailable(self) -> str:
        """Returns why no call can use the kernels; empty if calls can."""
        return ""

    def missing(self, problem: str = "") -> Rejection | None:
        """Rejects a call because of a problem, by default that of every call, which keeps the kernels from use."""
        problem = problem or self.unavailable()
        return Rejection(f"the {self.title} are missing: {problem}", missing=problem) if problem else None

    def supports(self, pass_name: str, call: Any) -> Rejection | None:
        """Returns why the kernels cannot compute a pass correctly; None if they can.

        Also asked where a library is missing: jaxgrad warns only of a library that the call could use.
        """
        return None

    def row(self, pass_name: str, call: Any, *, resized: bool = False) -> Preference | None:
        """Returns the row that says whether this backend, a later one of the platform or XLA is the fastest.

        None if there is none. `resized` says whether `vmap` or a mesh has changed the sizes of a selected call.
        """
        return None

    def find_plan(self, pass_name: str, call: Any) -> Rejection | None:
        """Asks the library for a plan. Returns why there is none; None if there is one."""
        return None

    def supports_resized(self, pass_name: str, call: Any) -> bool:
        """Whether the backend can run a pass whose sizes `vmap` or a mesh has changed."""
        return self.supports(pass_name, call) is None

    def remark(self, pass_name: str, call: Any) -> str:
        """Returns what `jaxgrad.explain` adds where this backend runs a pass."""
        return ""

    def typical_rejection(self, op_name: str, pass_name: str) -> Rejection | None:
        """Returns the rejection in a typical call, for `jaxgrad.explain` without arguments."""
        return None

    def plan_cache_info(self) -> dict[str, int]:
        """Returns the counters of the backend's plan cache; empty if it has none."""
        return {}

    def reject(self, pass_name: str, call: Any, *, forced: bool) -> Rejection | None:
        """Returns why the backend does not run a pass of a call; None if it does."""
        if rejection := self.supports(pass_name, call) or self.missing():
            return rejection
        if not forced and (why := self.why_slower(pass_name, call)):
            return Rejection(why, slower=True)
        return self.find_plan(pass_name, call)

    def why_slower(self, pass_name: str, call: Any) -> str:
        """Returns why XLA or a later backend of the platform is faster for a pass; empty if this backend is."""
        row = self.row(pass_name, call)
        return row.why if row is not None and row.prefer != self.implementation else ""


@dataclasses.dataclass(frozen=True, eq=False)
class Op:
    """A public op.

    Attributes:
      name: the name of the public function.
      passes: the passes, the first of which computes the op's value.
      backends: the backends; among those of one platform, the preferred one first.
      remark_on_xla: returns what `jaxgrad.explain` adds where XLA runs a pass, for the name of the pass, the op's
        description of the call and the platform that the program is lowered for.
    """

    name: str
    passes: tuple[str, ...]
    backends: tuple[Backend, ...]
    remark_on_xla: Callable[[str, Any, str], str] = lambda *_: ""

    def __post_init__(self) -> None:
        OPS[self.name] = self

    def public(self, function: _Function) -> _Function:
        """Decorator of the op's public function, by which `jaxgrad.explain` recognizes the op."""
        _PUBLIC[function] = self
        return function

    def backend(self, implementation: str) -> Backend | None:
        """Returns the backend of an implementation, or None."""
        return next((b for b in self.backends if b.implementation == implementation), None)

    def check_implementation(self, implementation: Any) -> None:
        """Raises ValueError where the argument `implementation=` is not one that some op has."""
        on_gpu = [backend.implementation for backend in self.backends if backend.platform == "cuda"]
        check_implementation(f"jaxgrad.{self.name}", implementation, on_gpu)


def check_implementation(caller: str, implementation: Any, on_gpu: Sequence[str] = ("cuda", "cudnn")) -> None:
    """Raises ValueError where an argument `implementation=` is not one that some op has.

    The error for the name of a platform, "gpu", lists `on_gpu`, the caller's implementations there.
    """
    if isinstance(implementation, str) and implementation in old_names.NAMES:
        return
    hint = ""
    if isinstance(implementation, str) and implementation.lower() == "gpu":
        hint = f"; on a GPU: {', '.join(map(repr, [*on_gpu, 'xla']))}"
    checks.check_choice(caller, "implementation", implementation, (None, *IMPLEMENTATIONS), hint)


OPS: dict[str, Op] = {}
_PUBLIC: dict[Callable[..., Any], Op] = {}
# Of all ops, also of those that are not loaded yet: an invalid `implementation=` gets the same message everywhere.
IMPLEMENTATIONS = ("xla", "cpu", "cuda", "cudnn", "onednn")


def op_of(function: Any) -> Op | None:
    """Returns the op of a public function, or None."""
    try:
        return _PUBLIC.get(function)
    except TypeError:  # not hashable
        return None


def platform_of(implementation: str) -> str:
    """Returns the platform that an implementation runs on, as JAX names it when a program is lowered."""
    for op in OPS.values():
        if (backend := op.backend(implementation)) is not None:
            return backend.platform
    raise LookupError(f"no op that is loaded has the implementation {implementation!r}")


def public_platform(platform: str) -> str:
    """Returns the name of a lowering platform in `jax.devices` and in jaxgrad's messages."""
    return "gpu" if platform == "cuda" else platform


def lowering_platform(platform: str) -> str:
    """Returns the name of a platform when a program is lowered for it: the inverse of `public_platform`."""
    return "cuda" if platform == "gpu" else platform


def plan_cache_info() -> dict[str, dict[str, int]]:
    """Returns counters of the plan caches of this process.

    A plan is a kernel that is ready to run one problem. The least recently used plan is dropped when a cache is full.

    Returns:
      By implementation ("onednn", "cudnn"), where its library can be loaded: "hits", "misses", "size" and
      "capacity". For cuDNN also "recorded", the number of plans retained for CUDA graphs, and "disk_hits" and
      "disk_misses", the lookups in `jaxgrad.config`'s plan_cache_dir; "checked" and "rejected", the engines that were
      compared with a reference and those of them that were wrong; and "unchecked", the plans whose engine could not be
      compared.

    Examples:
      >>> sorted(jaxgrad.plan_cache_info()["onednn"])
      ['capacity', 'hits', 'misses', 'size']
    """
    found: dict[str, dict[str, int]] = {}
    for op in OPS.values():
        for backend in op.backends:
            if backend.implementation not in found and (info := backend.plan_cache_info()):
                found[backend.implementation] = info
    return found
