"""Runs gradients over a mesh of eight devices, compares with one device, and reads the compiled program.

For interpreters that were started with `EIGHT_DEVICES`.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

EIGHT_DEVICES = {
    "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
    "JAX_PLATFORMS": "cpu",
    "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
}


def mesh(*, explicit: bool = False, **sizes: int) -> Mesh:
    """Of the axes and sizes given, by default one axis "d" of eight devices."""
    sizes = sizes or {"d": 8}
    kind = AxisType.Explicit if explicit else AxisType.Auto
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=(kind,) * len(sizes))


def collectives(hlo: str) -> dict[str, int]:
    """How often each operation between devices stands in a compiled program."""
    names = re.findall(r" (all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)(?:-start)?\(", hlo)
    return {name: names.count(name) for name in names}


def close(found: Any, expected: Any, tolerance: float = 2e-5) -> None:
    """Relative to the largest element of each array."""

    def one(found: Any, expected: Any) -> None:
        scale = float(np.max(np.abs(expected), initial=0))
        np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance * max(scale, 1e-3))

    jax.tree.map(one, found, expected)


def over(mesh: Mesh, function: Callable[..., Any], args: Sequence[Any], specs: Sequence[Any]) -> tuple[Any, dict]:
    """The results of `jit` over the mesh, compared with those of one device, and the program's collectives."""
    expected = jax.jit(function)(*args)
    placed = [
        jax.tree.map(lambda a, spec=spec: jax.device_put(a, NamedSharding(mesh, spec)), arg)
        for arg, spec in zip(args, specs, strict=True)
    ]
    with jax.set_mesh(mesh):
        compiled = jax.jit(function).lower(*placed).compile()
        found = compiled(*placed)
    close(found, expected)
    return found, collectives(compiled.as_text())


def check_shard_map(loss: Callable[..., Any], args: Sequence[Any], specs: Sequence[Any], by: tuple[int, ...]) -> None:
    """The gradients of a loss that is a sum over the batch: of a sharded loss, with marks and without, and inside."""
    d = mesh()
    expected = jax.jit(jax.grad(loss, by))(*args)

    def everywhere(*args: Any) -> Any:
        return lax.psum(loss(*args), "d")

    shard_map = functools.partial(jax.shard_map, mesh=d, in_specs=tuple(specs))
    for check_vma in (True, False):
        sharded = shard_map(everywhere, out_specs=P(), check_vma=check_vma)
        close(jax.jit(jax.grad(sharded, by))(*args), expected)
    inside = shard_map(jax.grad(loss, by), out_specs=tuple(specs[i] for i in by))
    close(jax.jit(inside)(*args), expected)
