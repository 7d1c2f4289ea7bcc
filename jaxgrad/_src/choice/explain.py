"""`jaxgrad.explain`: which implementation runs each pass of a call, and why."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from jaxgrad._src.choice.candidates import Forced
from jaxgrad._src.choice.op import OPS, Backend, Op, lowering_platform, op_of, public_platform
from jaxgrad._src.choice.selection import Selection, recording, select_typical
from jaxgrad._src.core.checks import check_choice
from jaxgrad._src.core.decorator import Decorator, decorator_of


@dataclasses.dataclass(frozen=True)
class PassExplanation:
    """The implementation that runs one pass of an op.

    Attributes:
      name: the pass, such as "forward" or "weight_gradient".
      implementation: as in `Explanation`.
      reason: why, in one sentence.
      preference: the row of a table of preferences that decided, and its measurement; empty if none did.
    """

    name: str
    implementation: str
    reason: str
    preference: str = ""

    def __str__(self) -> str:
        return f"{self.name}: {self.implementation!r} ({_reasons(self)})"


@dataclasses.dataclass(frozen=True)
class Explanation:
    """The implementation that runs an op on one platform. Prints as a sentence.

    Attributes:
      op: the name of the op.
      platform: the JAX platform, such as `"cpu"` or `"gpu"`.
      implementation: what computes the op's value: `"cpu"` or `"cuda"` (jaxgrad's kernels for that platform),
        `"onednn"`, `"cudnn"` or `"xla"`.
      reason: why, in one sentence.
      passes: one explanation for each pass, where the passes differ; otherwise empty.
      preference: as in `PassExplanation`.
    """

    op: str
    platform: str
    implementation: str
    reason: str
    passes: tuple[PassExplanation, ...] = ()
    preference: str = ""

    def __str__(self) -> str:
        if self.passes:
            return f"{self.op} on {self.platform}: {'; '.join(map(str, self.passes))}"
        return f"{self.op} on {self.platform}: {self.implementation!r} ({_reasons(self)})"


def _reasons(explained: Explanation | PassExplanation) -> str:
    return f"{explained.reason}; {explained.preference}" if explained.preference else explained.reason


def explain(op: Callable[..., Any], *args: Any, platform: str | None = None, **kwargs: Any) -> Explanation:
    """Returns which implementation runs a call of an op and of its gradients, and why. Runs nothing.

    Args:
      op: an op of jaxgrad, such as `jaxgrad.conv_general_dilated`, or a partial of one, of functools or equinox.
        Decorators of jaxgrad around it, such as `jaxgrad.config.override(...)`, are in force.
      *args: the arguments of the call. Arrays may be `jax.ShapeDtypeStruct`. Without arguments, a typical call is
        explained.
      platform: "cpu", "gpu" (or "cuda"), "rocm" or "tpu"; by default the platform of JAX's default device.
      **kwargs: the keyword arguments of the call, including `implementation`.

    Returns:
      An `Explanation`.

    Raises:
      ValueError: `op` is not an op of jaxgrad, `platform` is unknown, the forced implementation does not run on
        `platform`, or the call itself would raise ValueError.
      TypeError: the call itself would raise TypeError, or there are arguments besides `implementation` but no arrays.
      RuntimeError: the forced implementation is not available on this machine.

    Examples:
      >>> x, w = jnp.ones((8, 64, 32, 32)), jnp.ones((64, 64, 3, 3))
      >>> explained = jaxgrad.explain(jaxgrad.conv_general_dilated, x, w, (1, 1), "SAME", platform="cpu")
      >>> explained.implementation, explained.reason
      ('onednn', 'oneDNN')
    """
    function, decorators, args, kwargs = _unwrapped(op, args, kwargs)
    contract = op_of(function)
    if contract is None:
        raise ValueError(f"jaxgrad.explain: op must be one of jaxgrad's ops ({', '.join(OPS)}), got {op!r}")
    check_choice("jaxgrad.explain", "platform", platform, (None, "cpu", "gpu", "cuda", "rocm", "tpu"))
    with contextlib.ExitStack() as contexts:
        for decorator in decorators:
            contexts.enter_context(decorator)
        return explanation(_selected(contract, function, args, kwargs), platform or jax.default_backend())


def _selected(contract: Op, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Selection:
    """The selection for a call of an op; for a typical call if there are no arrays."""
    if not args and not any(hasattr(value, "ndim") and value.ndim > 0 for value in kwargs.values()):
        try:
            inspect.signature(function).bind_partial(**kwargs)
        except TypeError as error:
            raise TypeError(f"jaxgrad.{contract.name}: {error}") from None
        if others := kwargs.keys() - {"implementation"}:
            raise TypeError(f"jaxgrad.explain: a call has arrays, got {', '.join(sorted(others))} without any")
        implementation = kwargs.get("implementation")
        contract.check_implementation(implementation)
        return select_typical(contract, implementation)
    # Only arrays without values are traced: the call checks the values of the others as it always does.
    given: dict[str, Any] = {**{str(i): value for i, value in enumerate(args)}, **kwargs}
    specs = {key: value for key, value in given.items() if isinstance(value, jax.ShapeDtypeStruct)}

    def call(arrays: dict[str, Any]) -> Any:
        both = {**given, **arrays}
        return function(*(both[str(i)] for i in range(len(args))), **{key: both[key] for key in kwargs})

    with recording() as selections:
        jax.eval_shape(call, specs)
    return selections[0]


def _unwrapped(
    op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, list[Decorator], tuple[Any, ...], dict[str, Any]]:
    """The op inside decorators and partials, jaxgrad's decorators from the outside in, and the arguments."""
    decorators = []
    while True:
        op = inspect.unwrap(op, stop=lambda each: decorator_of(each) is not None or _is_partial(each))
        if (decorator := decorator_of(op)) is not None:
            decorators.append(decorator)
            op = op.__wrapped__
        elif _is_partial(op):
            op, args, kwargs = op.func, (*op.args, *args), {**op.keywords, **kwargs}
        else:
            return op, decorators, args, kwargs


def _is_partial(op: Any) -> bool:
    """Whether it is a `functools.partial`, or one of equinox."""
    return callable(op) and all(hasattr(op, name) for name in ("func", "args", "keywords"))


def explanation(selection: Selection, platform: str) -> Explanation:
    """Explains a selection; raises ValueError where a forced implementation cannot run on `platform`."""
    platform = public_platform(platform)
    passes = tuple(explain_pass(selection, name, platform) for name in selection.op.passes)
    first, alike = passes[0], len({(found.implementation, found.reason, found.preference) for found in passes}) == 1
    own = () if alike else passes
    return Explanation(selection.op.name, platform, first.implementation, first.reason, own, first.preference)


def explain_pass(selection: Selection, pass_name: str, platform: str) -> PassExplanation:
    """Explains a selection for one pass; raises as `explanation` does."""
    implementation, reason, decided_by = _decided(selection, pass_name, public_platform(platform))
    if ignored := selection.ignored_choice(pass_name, lowering_platform(platform)):
        reason += f"; {ignored}"
    row = decided_by.row(pass_name, selection.call) if decided_by and selection.call is not None else None
    return PassExplanation(pass_name, implementation, reason, str(row or ""))


def _decided(selection: Selection, pass_name: str, platform: str) -> tuple[str, str, Backend | None]:
    """The implementation, the reason, and the backend whose table of preferences decided, if one did."""
    op, forced = selection.op, selection.implementation
    if forced == "xla":
        return forced, _on_xla("forced by implementation='xla'", selection, pass_name, platform), None
    if forced is not None:
        Forced(op.name, forced).lowered_for(platform)
        backend = op.backend(forced)
        assert backend is not None
        return forced, _with_remark(f"forced by implementation={forced!r}", selection, backend, pass_name), None
    reason, missing = f"jaxgrad has no {op.name} kernel for the platform {platform!r}", ""
    decided_by = None
    here = [backend for backend in op.backends if public_platform(backend.platform) == platform]
    rejections = {backend: selection.rejections.get((backend.implementation, pass_name)) for backend in here}
    asked = [backend for backend, rejection in rejections.items() if rejection is None or rejection.is_asked]
    for backend in asked or here:
        rejection = rejections[backend]
        by_table = selection.choice(backend, pass_name) is None
        if rejection is None:
            why = _with_remark(selection.reason(backend, pass_name), selection, backend, pass_name)
            return backend.implementation, why + missing, backend if by_table else None
        if rejection.missing and rejection.missing in missing:
            continue  # the same library is missing for two backends
        reason = rejection.reason + missing
        missing += f"; {rejection.reason}" if rejection.missing else ""
        decided_by = backend if rejection.slower and by_table else None
    if decided_by is not None and (remark := _remark_on_xla(selection, pass_name, platform)):
        return "xla", remark + missing, decided_by  # the reason of the row is about other calls of the class
    return "xla", _on_xla(reason, selection, pass_name, platform), decided_by


def _with_remark(reason: str, selection: Selection, backend: Backend, pass_name: str) -> str:
    remark = "" if selection.call is None else backend.remark(pass_name, selection.call)
    return f"{reason}; {remark}" if remark else reason


def _on_xla(reason: str, selection: Selection, pass_name: str, platform: str) -> str:
    remark = _remark_on_xla(selection, pass_name, platform)
    return f"{reason}; {remark}" if remark else reason


def _remark_on_xla(selection: Selection, pass_name: str, platform: str) -> str:
    call = selection.call
    return "" if call is None else selection.op.remark_on_xla(pass_name, call, lowering_platform(platform))
