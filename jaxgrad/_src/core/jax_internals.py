"""The private names of JAX that jaxgrad uses, with a fallback for each.

`install` checks those that `jaxgrad.accelerate` depends on.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Collection
from functools import lru_cache, partial, wraps
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import jax
from jax.extend.core import Jaxpr, JaxprEqn, Primitive, subjaxprs
from jax.interpreters import mlir
from jax.sharding import AbstractMesh

try:
    from jax._src.core import get_axis_env
except ImportError:
    get_axis_env = None  # type: ignore[assignment]

try:
    from jax._src.xla_metadata_lib import current_xla_metadata
except ImportError:
    current_xla_metadata = None  # type: ignore[assignment]

try:
    from jax._src.core import ShardingTypeError as ShardingTypeError
except ImportError:

    class ShardingTypeError(Exception):  # type: ignore[no-redef]
        """An error that is never raised: in this release of JAX it has another name."""


try:
    from jax._src.util import register_cache
except ImportError:
    register_cache = None  # type: ignore[assignment]

Function = Callable[..., Any]
_Function = TypeVar("_Function", bound=Function)
Metadata = dict[str, Any]

_PLATFORMS = ("cpu", "cuda")


def cleared_lru_cache(maxsize: int) -> Callable[[_Function], _Function]:
    """`functools.lru_cache` for what depends on the shapes of calls. `jax.clear_caches` empties it.

    Where this release of JAX has no register of caches, entries stay until newer ones replace them.
    """

    def decorate(function: _Function) -> _Function:
        cached = lru_cache(maxsize)(function)
        clear_with_caches_of_jax(cached)
        return cached  # type: ignore[return-value]

    return decorate


def clear_with_caches_of_jax(cache: Any) -> None:
    """Lets `jax.clear_caches` empty a cache that has the methods of those of `functools.lru_cache`."""
    if register_cache is not None:
        register_cache(cache, str(cache))


def install(
    primitives: Collection[Primitive], rule: Function, lower_marked: Function, is_marked: Callable[[Metadata], bool]
) -> str:
    """Makes `rule` the lowering rule of primitives, after a check that JAX calls such a rule with the metadata.

    Args:
      primitives: the primitives.
      rule: called with the primitive, JAX's rule, the platform, and the arguments of a lowering rule: context, operands
        and, as keyword arguments, the parameters of the equation.
      lower_marked: lowers a program with one equation of each primitive, all of which are marked.
      is_marked: whether metadata have the mark.

    Returns:
      Why this release of JAX is not supported, in which case nothing is changed; empty if it is.
    """
    found: dict[Primitive, bool] = {}
    problems: list[str] = []

    def check() -> None:
        own_thread = threading.get_ident()  # others may lower such equations at the same time

        def checking(
            primitive: Primitive, original: Function, platform: str, context: Any, *operands: Any, **parameters: Any
        ) -> Any:
            if threading.get_ident() == own_thread:
                one_device = context.module_context.axis_context
                _ = one_device.num_devices, one_device.device_assignment  # `needs_rule_of_jax` allows for their absence
                found[primitive] = is_marked(metadata(context)) and not needs_rule_of_jax(context)
            return original(context, *operands, **parameters)

        try:
            from jax._src import dispatch

            if current_xla_metadata is None:
                raise ImportError("no current_xla_metadata")
            requires_devices = dispatch.jaxpr_has_prim_requiring_devices
            rules = {key: _rule_of_jax(*key) for key in itertools.product(primitives, _PLATFORMS)}
            with_marks = _with_marked_equations(requires_devices, primitives, is_marked)
            try:
                _register(checking, rules)
                setattr(dispatch, "jaxpr_has_prim_requiring_devices", with_marks)  # noqa: B010
                lower_marked()
                if found != dict.fromkeys(primitives, True):
                    raise RuntimeError(f"of the lowered equations, these are marked: {found}")
            except Exception:
                setattr(dispatch, "jaxpr_has_prim_requiring_devices", requires_devices)  # noqa: B010
                for (primitive, platform), original in rules.items():
                    mlir.register_lowering(primitive, original, platform=platform)
                raise
            _register(rule, rules)
        except Exception as error:  # whatever a release of JAX that was rewritten raises
            problems.append(f"{type(error).__name__}: {error}")

    # In a new thread, JAX's settings are the defaults, whatever the caller has entered.
    thread = threading.Thread(target=check)
    thread.start()
    thread.join()
    return f"jax {jax.__version__} is not supported ({problems[0]})" if problems else ""


def axes_of_vmap() -> frozenset[str]:
    """The explicit mesh axes that split an axis which `vmap` maps in the code being traced.

    JAX refuses a `shard_map` over them there. Empty where this release of JAX does not say.
    """
    environment = None if get_axis_env is None else get_axis_env()
    return getattr(environment, "explicit_mesh_axis_names", frozenset())


def current_metadata() -> Metadata:
    """The XLA metadata that the next equation gets. Empty where this release of JAX does not say."""
    return {} if current_xla_metadata is None else dict(current_xla_metadata() or {})


def metadata(context: Any) -> Metadata:
    """The XLA metadata of the equation that a lowering rule is called for."""
    return dict(context.jaxpr_eqn_ctx.xla_metadata or {})


def equation_metadata(equation: JaxprEqn) -> Metadata:
    """The XLA metadata of an equation of a jaxpr."""
    return dict(equation.ctx.xla_metadata or {})


def frames(equation: JaxprEqn) -> list[Any]:
    """The frames that traced an equation, the innermost first; each has file_name, line_num and function_name."""
    traceback = equation.source_info.traceback
    return [] if traceback is None else traceback.frames


def scopes(equation: JaxprEqn) -> tuple[str, ...]:
    """The named scopes around an equation in its jaxpr, the outermost first, without the names of transformations.

    Empty where this release of JAX does not say.
    """
    stack = getattr(equation.source_info.name_stack, "stack", ())
    names = tuple(entry.name if type(entry).__name__ == "Scope" else None for entry in stack)
    for i, name in enumerate(names):
        first, second = (tuple(filter(None, part)) for part in (names[:i], names[i:]))
        if name is None and first == second:  # JAX repeats the scopes of some calls: transpose(jvp(a))/jvp(a)
            return first
    return tuple(filter(None, names))


def needs_rule_of_jax(context: Any) -> bool:
    """Whether an equation must be lowered by JAX's rule, because the passes cannot be lowered there.

    Outside `shard_map`, on several devices, they need `custom_partitioning`. JAX cannot lower it in a program that is
    exported, that XLA partitions by GSPMD, or whose devices are not known. Inside `shard_map` and over explicit axes,
    the passes do not partition over the other axes of the mesh. Nor do they run in a computation on a GPU's host.
    """
    axis_context = context.module_context.axis_context
    num_devices = getattr(axis_context, "num_devices", None)
    devices = getattr(axis_context, "device_assignment", None)
    shardy = jax.config.jax_use_shardy_partitioner  # type: ignore[attr-defined]
    for_export = context.module_context.lowering_parameters.for_export
    if context.jaxpr_eqn_ctx.compute_type is not None:
        return True
    meshes = _meshes_with_known_axes(jax.sharding.get_abstract_mesh(), context.avals_in)
    if meshes:
        return any(map(_has_other_axes, meshes))
    return num_devices != 1 and (devices is None or not shardy or for_export)


def is_partitioned(context: Any) -> bool:
    """Whether XLA partitions the equation that a lowering rule is called for over several devices."""
    several = getattr(context.module_context.axis_context, "num_devices", None) != 1
    return several and not _meshes_with_known_axes(jax.sharding.get_abstract_mesh(), context.avals_in)


def _meshes_with_known_axes(mesh: AbstractMesh, avals: Any) -> list[AbstractMesh]:
    """The meshes, of the context and of the operands' types, that have manual or explicit axes."""
    meshes = mesh, *(aval.sharding.mesh for aval in avals)
    return [mesh for mesh in meshes if mesh.manual_axes or mesh.explicit_axes]


def _has_other_axes(mesh: AbstractMesh) -> bool:
    """Whether the mesh has axes beside the manual ones or, if it has none of them, beside the explicit ones."""
    known = mesh.manual_axes or mesh.explicit_axes
    return any(size > 1 for axis, size in mesh.shape.items() if axis not in known)


def _rule_of_jax(primitive: Primitive, platform: str) -> Function:
    entry = mlir._platform_specific_lowerings[platform].get(primitive)
    return (entry or mlir._lowerings[primitive]).rule


def _register(rule: Function, rules: dict[tuple[Primitive, str], Function]) -> None:
    for (primitive, platform), original in rules.items():
        mlir.register_lowering(primitive, partial(rule, primitive, original, platform), platform=platform)


def _with_marked_equations(
    requires_devices: Function, primitives: Collection[Primitive], is_marked: Callable[[Metadata], bool]
) -> Function:
    """JAX's check whether a program can only be lowered for known devices, extended to marked equations.

    They are lowered to `custom_partitioning`, which needs the devices. JAX's check knows primitives only, and
    equations without the mark do not need devices.
    """
    known: WeakKeyDictionary[Jaxpr, bool] = WeakKeyDictionary()  # programs share jaxprs

    def has_marked_equation(jaxpr: Jaxpr) -> bool:
        if (found := known.get(jaxpr)) is None:
            found = any(map(needs_devices, jaxpr.eqns)) or any(map(has_marked_equation, subjaxprs(jaxpr)))
            known[jaxpr] = found
        return found

    def needs_devices(equation: JaxprEqn) -> bool:
        if equation.primitive not in primitives or not is_marked(equation_metadata(equation)):
            return False
        avals = [variable.aval for variable in equation.invars]
        return not _meshes_with_known_axes(equation.ctx.cur_abstract_mesh, avals)

    @wraps(requires_devices)
    def check(jaxpr: Jaxpr) -> bool:
        return bool(requires_devices(jaxpr)) or has_marked_equation(jaxpr)

    return check


def lower_all(function: Function, *args: Any) -> None:
    """Lowers a function and all calls in it.

    Over a mesh, `custom_partitioning` lowers the calls of shards while XLA compiles. So the program is compiled too,
    unless its module says that it has one partition.
    """
    lowered = jax.jit(function).lower(*args)
    module: Any = lowered.compiler_ir("stablehlo")
    attributes = module.operation.attributes if module else {}
    if "mhlo.num_partitions" not in attributes or int(attributes["mhlo.num_partitions"]) > 1:
        lowered.compile()
