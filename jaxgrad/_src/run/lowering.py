"""Lowers a pass to the kernel of the program's platform."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import mlir

from jaxgrad._src.choice.candidates import Candidates
from jaxgrad._src.choice.op import platform_of
from jaxgrad._src.run.mesh_axes import results_vary_as_operands


def platform_call(
    candidates: Candidates, kernels: Mapping[str, Callable[..., Any]], xla: Callable[..., Any], *args: Any
) -> Any:
    """Calls the kernel of the candidate for the platform of the program, or `xla` if no candidate runs there.

    The platform is known when the program is lowered. It need not be that of JAX's default device: a program lowered
    for a GPU on a machine without one takes the GPU's branch. The results vary over the mesh axes of the operands.

    Args:
      candidates: of the pass.
      kernels: by implementation, a function of the operands; at least those of the candidates.
      xla: the same function on XLA.
      *args: the operands, arrays or None.
    """
    args = with_lowering_hook(candidates, args)
    taken: dict[str, Callable[..., Any]] = {}
    for name in candidates.implementations:
        taken.setdefault(platform_of(name), results_vary_as_operands(kernels[name]))
    xla = results_vary_as_operands(xla)
    if not taken:
        return xla(*args)
    forced = candidates.forced
    if only := platform_of(forced.implementation) if forced else candidates.platform:
        return taken.get(only, xla)(*args)
    return lax.platform_dependent(*args, **taken, default=xla)


def with_lowering_hook(candidates: Candidates, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Returns the operands with the lowering hook of the candidates attached to the first one, an array.

    The hook runs when a program with this call is lowered, and not for calls that are traced and then left out, such as
    the call of one example under `vmap`. A forced implementation raises ValueError where the program is for another
    platform. `lax.platform_dependent` without a default raises there too, but its error names neither the op nor the
    argument.
    """
    if (hook := candidates.lowering_hook) is None:
        return args
    return _lowering_hook_p.bind(args[0], hook=hook), *args[1:]


_lowering_hook_p = Primitive("jaxgrad_lowering_hook")


@_lowering_hook_p.def_abstract_eval
def _abstract_eval(aval, *, hook):
    return aval


@_lowering_hook_p.def_impl
def _impl(array, *, hook):
    array = jax.device_put(array)  # under `jax.disable_jit` it may be a constant, which has no device
    for device in array.devices():
        hook.lowered_for(device.platform)
    return array


def _lowering(ctx, array, *, hook):
    for platform in ctx.platforms or ctx.module_context.platforms:
        hook.lowered_for(platform)
    return [array]


mlir.register_lowering(_lowering_hook_p, _lowering)
