"""Runs gradients over a mesh of devices, compares with one device, and counts the collectives of the program.

`run_checks` runs the checks in a fresh interpreter with eight CPU devices, or with all GPUs.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

_ENVIRONMENTS = {
    "cpu": {
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
        "JAX_PLATFORMS": "cpu",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
    },
    "gpu": {
        "JAX_PLATFORMS": "cuda",
        "JAX_DEFAULT_MATMUL_PRECISION": "highest",  # not TF32, for which the tolerances are too small
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",  # several interpreters share the GPUs
    },
}
_FEWEST, _MOST = 2, 8  # devices
_ON_GPU = jax.default_backend() == "gpu"
# The `implementation` arguments of the checks.
KERNEL = "cudnn" if _ON_GPU else "cpu"
OWN_KERNEL = "cuda" if _ON_GPU else "cpu"
XLA_ON_GPU = "xla" if _ON_GPU else "cpu"  # for ops without a GPU kernel
_TOLERANCE = 1e-4 if _ON_GPU else 2e-5  # cuDNN selects other kernels for a part of a batch than for the whole batch


def needs(devices: int) -> Callable[..., Any]:
    """Decorates a check that requires at least this number of devices."""

    def mark(check: Callable[[], None]) -> Callable[[], None]:
        check.devices = devices  # type: ignore[attr-defined]
        return check

    return mark


def on_devices(*groups: Sequence[Callable[[], None]]) -> pytest.MarkDecorator:
    """Parametrizes a test of (platform, checks). The checks of a group share one interpreter; on GPUs, those that need
    the same number of GPUs do."""
    params = []
    for i, group in enumerate(groups):
        params.append(pytest.param("cpu", [check.__name__ for check in group], id=f"cpu-{i}"))
        for count in sorted({getattr(check, "devices", _FEWEST) for check in group}):
            names = [check.__name__ for check in group if getattr(check, "devices", _FEWEST) == count]
            params.append(pytest.param("gpu", names, marks=pytest.mark.gpu(count=count), id=f"{count}-gpus-{i}"))
    return pytest.mark.parametrize(("platform", "checks"), params)


def import_test_module(file: str, name: str) -> str:
    """Source code that imports the test module in `file` as `name`. Test modules of several folders share a name."""
    path = Path(file)
    return f"import sys\nsys.path.insert(0, {str(path.parent)!r})\nimport {path.stem} as {name}\n"


def run_checks(run_python: Callable[..., Any], platform: str, file: str, checks: Sequence[str]) -> None:
    """Runs these functions of the test module `file` in one fresh interpreter."""
    script = f"for name in {list(checks)}:\n  print(name, flush=True)\n  getattr(module, name)()"
    run_python(import_test_module(file, "module") + script, **_ENVIRONMENTS[platform])


def mesh(*, explicit: bool = False, **sizes: int) -> Mesh:
    """A mesh with the given axes, and a first axis "d" over the remaining devices."""
    devices = min(_MOST, 1 << jax.device_count().bit_length() - 1)
    sizes = {"d": devices // math.prod(sizes.values()), **sizes}
    kind = AxisType.Explicit if explicit else AxisType.Auto
    return jax.make_mesh(
        tuple(sizes.values()), tuple(sizes), axis_types=(kind,) * len(sizes), devices=jax.devices()[:devices]
    )


def collectives(hlo: str) -> dict[str, int]:
    """Number of collectives of each kind in a compiled program; for all-gather, the number of gathered arrays.

    XLA merges collectives: one may have several arrays. On a GPU a collective has a start and a done instruction.
    """
    pattern = r" (all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)(?:-start)?\(([^)]*)\)"
    found: dict[str, int] = {}
    for name, operands in re.findall(pattern, hlo):
        found[name] = found.get(name, 0) + (operands.count("%") if name == "all-gather" else 1)
    return found


def close(found: Any, expected: Any, tolerance: float = _TOLERANCE) -> None:
    """Compares trees of arrays; errors are relative to the largest element of each array."""

    def one(found: Any, expected: Any) -> None:
        scale = float(np.max(np.abs(expected), initial=0))
        np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance * max(scale, 1e-3))

    jax.tree.map(one, found, expected)


def over(mesh: Mesh, function: Callable[..., Any], args: Sequence[Any], specs: Sequence[Any]) -> tuple[Any, dict]:
    """Results and collectives of `jit` over the mesh, after comparison with the results of one device."""
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
    """Checks gradients of a sum over the batch: outside `shard_map`, with and without `check_vma`, and inside.

    Also without `jax.jit`, where `shard_map` runs each operation by itself.
    """
    d = mesh()
    expected = jax.jit(jax.grad(loss, by))(*args)

    def everywhere(*args: Any) -> Any:
        return lax.psum(loss(*args), "d")

    shard_map = functools.partial(jax.shard_map, mesh=d, in_specs=tuple(specs))
    for check_vma in (True, False):
        sharded = shard_map(everywhere, out_specs=P(), check_vma=check_vma)
        close(jax.jit(jax.grad(sharded, by))(*args), expected)
        close(jax.grad(sharded, by)(*args), expected)
    inside = shard_map(jax.grad(loss, by), out_specs=tuple(specs[i] for i in by))
    close(jax.jit(inside)(*args), expected)
    close(inside(*args), expected)
