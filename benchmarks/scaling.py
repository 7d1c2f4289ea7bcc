"""Training steps with the batch spread over all devices, by `jit` over a mesh, and on one device alone."""

from __future__ import annotations

import argparse
import dataclasses
import gc
import re
from collections import Counter
from collections.abc import Sequence
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxgrad
from benchmarks import environment, steps
from benchmarks.compare import Work, compare
from benchmarks.networks import NETWORKS
from benchmarks.networks.initial import describe
from benchmarks.networks.jax_ops import JaxgradOps, LaxOps
from benchmarks.report import OURS
from benchmarks.timing import Contender, Effort, jax_loop_contender
from benchmarks.training import State, arguments, training_step

BASELINE = "jax.lax"
_ALONE = ", one device"
_LIBRARIES = {OURS: JaxgradOps, BASELINE: LaxOps}
NOTES = (
    "Cases are the devices, a network of benchmarks/networks, the batch of each device and the sizes of its input.",
    "A step is that of `python -m benchmarks steps`: on several devices all of them share the gradients' sums and the "
    "statistics of batch normalisation.",
    "Every device has the same batch, so that a step comes to the same on one device, and contenders can be compared.",
    "Throughput is of examples: of all devices together, over that of one.",
    "The floor is one device's arithmetic.",
)
_CHECKED = steps.Case("resnext", 4, 16)  # on each device
_CHECKED_STEPS = 4
_ROUNDING = 1e-4  # of a loss, relative


@dataclasses.dataclass(frozen=True)
class Case(steps.Case):
    """`batch` is that of each device."""

    @property
    def label(self) -> str:
        return f"{jax.device_count()} devices x {super().label}"


CASES = {
    "gpu": (
        Case("unet", 16, 256, "bfloat16"),
        Case("wavenet", 8, 16384, "bfloat16"),
        Case("resnet50", 256, 224, "bfloat16"),
        Case("resnext50", 128, 224, "bfloat16"),
    )
}
QUICK_CASES = (Case("resnext", 2, 8), Case("wavenet", 1, 32, "bfloat16"))


def parse_case(text: str) -> Case:
    """network,batch,size or network,batch,size,bf16; the batch is that of each device"""
    try:
        return Case(**dataclasses.asdict(steps.parse_case(text)))
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"{error}; {parse_case.__doc__}") from None


def measure(cases: Sequence[Case], effort: Effort) -> dict[str, Any]:
    """The report, as report.py wants it."""
    if jax.device_count() < 2:
        raise SystemExit(
            "scaling needs several devices, JAX sees one; with XLA_FLAGS=--xla_force_host_platform_device_count=2 "
            "it takes a CPU for two"
        )
    ops = (jaxgrad.conv_general_dilated, jaxgrad.conv_transpose, jaxgrad.batch_norm_training)
    losses, rows = _checked_losses(), []
    for case in cases:
        print(case.label, flush=True)
        rows.append(_row(case, effort))
        gc.collect()  # what a case had on the devices
    return {
        "op": "scaling",
        "environment": environment.describe(),
        "implementation": "; ".join(str(jaxgrad.explain(op)) for op in ops),
        "left_out": {},
        "notes": (*NOTES, _told(losses)),
        "losses": losses,
        "rows": rows,
    }


def _row(case: Case, effort: Effort) -> dict[str, Any]:
    network, devices = NETWORKS[case.network], jax.device_count()
    described = describe(network.run, case.x)
    state, x, target = arguments(network, described, case.x)
    found: list[Contender] = []
    for suffix, count in (("", devices), (_ALONE, 1)):
        for name, library in _LIBRARIES.items():
            mesh = _mesh(count)
            step = partial(_step, library, case.network, mesh)
            batch = (jnp.concatenate([array] * count) for array in (x, target))
            start = partial(jax_loop_contender, name + suffix, step, *_placed(mesh, state, *batch))
            found.append(steps.timed(f"{name}{suffix}: ready", start))
    collectives = {c.name: _collectives(c.program) for c in found if not c.name.endswith(_ALONE)}
    found = [dataclasses.replace(steps.in_pieces(c, state), temporary_bytes=None) for c in found]
    work = Work(
        label=case.label,
        measure="training step",
        settings={**dataclasses.asdict(case), "devices": devices},
        dtype=case.dtype,
        flops=described.flops,
        array_bytes={"parameters": sum(leaf.nbytes for leaf in jax.tree.leaves(state.params))},
    )
    row = steps.timed("measured", partial(compare, work, found, effort, steps.tolerances(case.dtype, state)))
    times = {name: row["times_ms"][name]["median"] for name in row["times_ms"]}
    throughput = {name: round(devices * times[name + _ALONE] / times[name], 3) for name in _LIBRARIES}
    print(f"  throughput over one device's: {throughput}; between devices: {collectives}", flush=True)
    return {**row, "throughput_over_one_device": throughput, "collectives": collectives}


def _mesh(devices: int) -> Mesh:
    return jax.make_mesh((devices,), ("batch",), axis_types=(AxisType.Auto,), devices=jax.devices()[:devices])


def _step(library: type[LaxOps], network: str, mesh: Mesh, *args: Any) -> tuple[State, jax.Array]:
    """The training step, whose next state every device has again."""
    found = training_step(library, NETWORKS[network], *args)
    return jax.lax.with_sharding_constraint(found, NamedSharding(mesh, P()))


def _placed(mesh: Mesh, state: State, x: jax.Array, target: jax.Array) -> tuple[State, jax.Array, jax.Array]:
    """Everywhere the state; of the batch a part on each device."""
    return (
        jax.device_put(state, NamedSharding(mesh, P())),
        *jax.device_put((x, target), NamedSharding(mesh, P("batch"))),
    )


@cache
def _checked_losses() -> dict[str, list[float]]:
    """Of some steps on one batch, by the number of devices that share it; raises where rounding does not explain them.

    In float32 without TF32, so that no more than rounding is between them.
    """
    devices = jax.device_count()
    case = dataclasses.replace(_CHECKED, batch=devices * _CHECKED.batch)
    network = NETWORKS[case.network]
    state, x, target = arguments(network, describe(network.run, case.x), case.x)
    losses: dict[str, list[float]] = {}
    for count in (1, devices):
        mesh = _mesh(count)
        with jax.default_matmul_precision("highest"):
            step = jax.jit(partial(_step, JaxgradOps, case.network, mesh))
            at, *batch = _placed(mesh, state, x, target)
            losses[str(count)] = []
            for _ in range(_CHECKED_STEPS):
                at, loss = step(at, *batch)
                losses[str(count)].append(float(loss))
    one, many = losses.values()
    if not np.allclose(many, one, rtol=_ROUNDING, atol=0):
        raise RuntimeError(f"{devices} devices come to the losses {many}, one device to {one}")
    return losses


def _told(losses: dict[str, list[float]]) -> str:
    one, many = map(np.array, losses.values())
    return (
        f"Of {_CHECKED_STEPS} steps of {_CHECKED.network} in float32 the losses on one device and on all, with the "
        f"same batch, differ by at most {np.max(np.abs(many / one - 1)):.0e} of themselves."
    )


_BYTES = {"bf16": 2, "f16": 2, "f32": 4, "f64": 8, "s32": 4, "u32": 4}


def _collectives(program: str) -> dict[str, dict[str, int]]:
    """The operations between devices in a compiled program: how many, and the bytes of what they return."""
    counts: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    pattern = r" = (.*?) (all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)(-start)?\("
    for shapes, name, _ in re.findall(pattern, program):
        counts[name] += 1
        for dtype, dims in re.findall(r"(\w+)\[([\d,]*)\]", shapes):
            sizes[name] += _BYTES.get(dtype, 1) * int(np.prod([int(n) for n in dims.split(",") if n]))
    return {name: {"count": counts[name], "bytes": sizes[name]} for name in counts}
