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
import jax.numpy as jnp
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
CONV_KERNEL = "cudnn" if _ON_GPU else "onednn"
OWN_KERNEL = "cuda" if _ON_GPU else "cpu"
XLA_ON_GPU = "xla" if _ON_GPU else "cpu"  # for ops without a GPU kernel
_TOLERANCE = 1e-4 if _ON_GPU else 2e-5  # cuDNN selects other kernels for a part of a batch than for the whole batch


def needs(devices: int) -> Callable[..., Any]:
    """Decorates a check that requires at least this number of devices."""

    def mark(check: Callable[[], None]) -> Callable[[], None]:
        check.devices = devices  # type: ignore[attr-defined]
        return check

    return mark


def on_devices(*groups: Sequence[Callable[[], None]], oldest: int | None = None) -> pytest.MarkDecorator:
    """Parametrizes a test of (platform, checks). The checks of a group share one interpreter; on GPUs, those that need
    the same number of GPUs do. With the oldest JAX, CI runs the first `oldest` groups: by default all."""
    params = []
    for i, group in enumerate(groups):
        marks = [pytest.mark.newest] if oldest is not None and i >= oldest else []
        params.append(pytest.param("cpu", [check.__name__ for check in group], marks=marks, id=f"cpu-{i}"))
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


def over(
    mesh: Mesh, function: Callable[..., Any], args: Sequence[Any], specs: Sequence[Any], expected: Any = None
) -> tuple[Any, dict]:
    """Results and collectives of `jit` over the mesh, after comparison with `expected`: the results of one device."""
    expected = jax.jit(function)(*args) if expected is None else expected
    placed = [
        jax.tree.map(lambda a, spec=spec: jax.device_put(a, NamedSharding(mesh, spec)), arg)
        for arg, spec in zip(args, specs, strict=True)
    ]
    with jax.set_mesh(mesh):
        compiled = jax.jit(function).lower(*placed).compile()
        found = compiled(*placed)
    close(found, expected)
    return found, collectives(compiled.as_text())


def check_reshaped_batch(loss: Callable[..., Any], args: Sequence[Any], batch: int = 0) -> None:
    """Checks the value and the gradient of a loss whose first operand has a split batch that is reshaped to [2, B/2].

    From four devices on, a part of a mesh axis splits each of the two dimensions. Nothing needs to be gathered for the
    loss of their sum over the first one. A loop over it, with a remat of each step, gathers that dimension.
    """

    def halves(x: jax.Array) -> jax.Array:
        return x.reshape(*x.shape[:batch], 2, -1, *x.shape[batch + 1 :])

    def of_sum(x: jax.Array, *rest: Any) -> jax.Array:
        return loss(halves(x).sum(batch), *rest)

    def of_micro_batches(x: jax.Array, *rest: Any) -> jax.Array:
        def step(total: jax.Array, half: jax.Array) -> tuple[jax.Array, None]:
            return total + jax.checkpoint(loss)(half, *rest), None

        return lax.scan(step, jnp.zeros(()), jnp.moveaxis(halves(x), batch, 0))[0]

    def check(function: Callable[..., Any], meshes: Sequence[tuple[Mesh, Any]], collectives: set[str]) -> None:
        gradient = jax.value_and_grad(function, tuple(range(len(args))))
        expected = jax.jit(gradient)(*args)
        for devices, axes in meshes:
            spec = P(*[None] * batch, axes)
            split = NamedSharding(devices, spec)

            def call(*args: Any, split: NamedSharding = split) -> Any:
                value, (dx, *rest) = gradient(*args)
                return value, (lax.with_sharding_constraint(dx, split), *rest)

            _, found = over(devices, call, args, (spec, *[P()] * (len(args) - 1)), expected)
            assert set(found) <= collectives, found

    meshes: list[tuple[Mesh, Any]] = [(mesh(), "d")]
    if (size := mesh().size) >= 4:
        meshes += [(mesh(m=2), ("d", "m")), (mesh(m=size // 2), ("m", "d"))]
    check(of_sum, meshes, {"all-reduce"})
    check(of_micro_batches, meshes[:1], {"all-reduce", "all-gather"})


def check_shard_map(
    loss: Callable[..., Any], args: Sequence[Any], specs: Sequence[Any], by: tuple[int, ...], *, op_by_op: bool = False
) -> None:
    """Checks gradients of a sum over the batch: outside `shard_map`, with and without `check_vma`, and inside.

    Also outside, with `check_vma`, without `jax.jit`, where `shard_map` runs each operation by itself. The others are
    run so only where `op_by_op`: each compiles every operation, which takes seconds.
    """
    d = mesh()
    expected = jax.jit(jax.grad(loss, by))(*args)

    def everywhere(*args: Any) -> Any:
        return lax.psum(loss(*args), "d")

    shard_map = functools.partial(jax.shard_map, mesh=d, in_specs=tuple(specs))
    for check_vma in (True, False):
        sharded = shard_map(everywhere, out_specs=P(), check_vma=check_vma)
        close(jax.jit(jax.grad(sharded, by))(*args), expected)
        if op_by_op or check_vma:
            close(jax.grad(sharded, by)(*args), expected)
    inside = shard_map(jax.grad(loss, by), out_specs=tuple(specs[i] for i in by))
    close(jax.jit(inside)(*args), expected)
    if op_by_op:
        close(inside(*args), expected)
