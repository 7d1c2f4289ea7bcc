"""Training steps with the batch spread over all devices, by `jit` over a mesh, and on one device."""

from __future__ import annotations

import argparse
import dataclasses
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
from benchmarks import lax_variants, steps
from benchmarks.compare import Work, compare
from benchmarks.contender_names import LAX, LAX_DILATED, ONE_DEVICE, OURS
from benchmarks.measuring import measured
from benchmarks.networks import NETWORKS
from benchmarks.networks.initial import describe
from benchmarks.networks.jax_ops import JaxgradOps, LaxOps
from benchmarks.options import Options
from benchmarks.timing import Contender, jax_loop_contenders, raised, timed
from benchmarks.training import State, arguments, training_step

_LIBRARIES = {OURS: JaxgradOps, LAX: LaxOps, LAX_DILATED: LaxOps}
CONTENDERS = tuple(_LIBRARIES)
NOTES = (
    "Cases are the devices, a network of benchmarks/networks, the batch of each device and the sizes of its input.",
    "A step is that of `python -m benchmarks steps`. The sums of the gradients and the statistics of batch "
    "normalization are over all devices.",
    "Every device has the same batch, so a step has the same result on one device, and outputs can be compared.",
    "Throughput is examples per second of all devices, over that of one device.",
    "jax.lax after lax.pad dilates and pads the input of transposed convolutions with lax.pad first.",
    "floor_ms is the time of the operations of one device.",
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


def measure(cases: Sequence[Case], options: Options) -> dict[str, Any]:
    """The report (report.py)."""
    if jax.device_count() < 2:
        raise SystemExit(
            "scaling needs several devices, JAX sees one. XLA_FLAGS=--xla_force_host_platform_device_count=2 makes two "
            "devices of a CPU"
        )
    losses, explanations = _checked_losses(), map(jaxgrad.explain, steps.OPS)
    return measured("scaling", cases, lambda case: [_row(case, options)], explanations, NOTES, losses=losses)


def _row(case: Case, options: Options) -> dict[str, Any]:
    network, devices = NETWORKS[case.network], jax.device_count()
    described = describe(network.run, case.x)
    state, x, target = arguments(network, described, case.x)
    found: list[Contender] = []
    has = {LAX_DILATED: described.transposed}
    libraries = {name: each for name, each in _LIBRARIES.items() if options.wants(name) and has.get(name, True)}
    for suffix, count in (("", devices), (ONE_DEVICE, 1)):
        mesh = _mesh(count)
        of = {name + suffix: partial(_step, library, case.network, mesh) for name, library in libraries.items()}
        placed = _placed(mesh, state, *(jnp.concatenate([array] * count) for array in (x, target)))
        in_force = {name + suffix: lax_variants.context_of(name) for name in libraries}
        made = partial(jax_loop_contenders, of, *placed, in_force=in_force)
        found += raised(timed(f"{', '.join(of)}: ready", made))
    collectives = {c.name: _collectives(c.program) for c in found if not c.name.endswith(ONE_DEVICE)}
    found = [dataclasses.replace(steps.in_pieces(c, state), temporary_bytes=None) for c in found]
    work = Work(
        label=case.label,
        measure="training step",
        settings={**dataclasses.asdict(case), "devices": devices},
        dtype=case.dtype,
        flops=described.flops,
        array_bytes={"parameters": sum(leaf.nbytes for leaf in jax.tree.leaves(state.params))},
    )
    limits = steps.tolerances(case.network, case.dtype, state)
    row = timed("measured", partial(compare, work, found, options.effort, limits))
    times = {name: row["times_ms"][name]["median"] for name in row["times_ms"]}
    throughput = {name: round(devices * times[name + ONE_DEVICE] / times[name], 3) for name in libraries}
    print(f"  throughput over one device's: {throughput}; between devices: {collectives}", flush=True)
    return {**row, "throughput_over_one_device": throughput, "collectives": collectives}


def _mesh(devices: int) -> Mesh:
    return jax.make_mesh((devices,), ("batch",), axis_types=(AxisType.Auto,), devices=jax.devices()[:devices])


def _step(library: type[LaxOps], network: str, mesh: Mesh, *args: Any) -> tuple[State, jax.Array]:
    """The training step, with the next state replicated over all devices."""
    found = training_step(library, NETWORKS[network], *args)
    return jax.lax.with_sharding_constraint(found, NamedSharding(mesh, P()))


def _placed(mesh: Mesh, state: State, x: jax.Array, target: jax.Array) -> tuple[State, jax.Array, jax.Array]:
    """The state on every device, the batch split over them."""
    return (
        jax.device_put(state, NamedSharding(mesh, P())),
        *jax.device_put((x, target), NamedSharding(mesh, P("batch"))),
    )


@cache
def _checked_losses() -> dict[str, list[float]]:
    """The losses of some steps on one batch, by the number of devices; raises where they differ by more than rounding.

    In float32 without TF32.
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
        raise RuntimeError(f"the losses on {devices} devices are {many}, on one device {one}")
    return losses


_BYTES = {"bf16": 2, "f16": 2, "f32": 4, "f64": 8, "s32": 4, "u32": 4}


def _collectives(program: str) -> dict[str, dict[str, int]]:
    """The collectives of a compiled program: their number and the bytes of their results."""
    counts: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    pattern = r" = (.*?) (all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)(-start)?\("
    for shapes, name, _ in re.findall(pattern, program):
        counts[name] += 1
        for dtype, dims in re.findall(r"(\w+)\[([\d,]*)\]", shapes):
            sizes[name] += _BYTES.get(dtype, 1) * int(np.prod([int(n) for n in dims.split(",") if n]))
    return {name: {"count": counts[name], "bytes": sizes[name]} for name in counts}
