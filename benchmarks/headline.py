"""The short table of README.md: rows chosen by hand, at least two of them with a speed-up below 1."""

from __future__ import annotations

from pathlib import Path

from benchmarks import report, wording
from benchmarks.contender_names import ACCELERATED, LAX_DILATED, LAX_PADDED, LAX_SLICED, OURS
from benchmarks.report import Report, Row
from benchmarks.wording import digits, ratio

# What the reader sees, the report, the case and the pass.
_ROWS = (
    ("3D U-Net training step, bf16", "steps-h200", "unet3d 2x64x64x64 bf16", "training step"),
    ("U-Net training step, bf16", "steps-h200", "unet 16x256x256 bf16", "training step"),
    ("WaveNet (causal) training step, bf16", "steps-h200", "wavenet-causal 8x16384 bf16", "training step"),
    ("ResNet-50 training step, bf16", "steps-h200", "resnet50 64x224x224 bf16", "training step"),
    ("ResNet blocks training step, bf16", "steps-h100-80gb-hbm3", "resnet-blocks 64x56x56 bf16", "training step"),
    ("small ResNeXt training step, f32", "steps-cpu", "resnext 8x32x32", "training step"),
    ("ResNet-18 training step, f32", "steps-cpu", "resnet18 4x224x224", "training step"),
    ("GRU (T=500, H=128), forward + backward, TF32", "gru-h200", "500,16,64,128 lbr=1", "forward+backward"),
)


def lines(results: Path) -> tuple[list[list[str]], list[str]] | None:
    """The table and the facts below it; None where a report or a row is missing."""
    table = [["workload", "device", "`jaxgrad.accelerate` (ms)", "ops of jaxgrad (ms)", "JAX (ms)", "PyTorch (ms)"]]
    parts: dict[str, list[Report]] = {}
    for title, name, label, measure in _ROWS:
        path = results / f"{name}.json"
        found = report.load(path) if path.exists() else {"rows": []}
        row = next((r for r in found["rows"] if (r["label"], r["measure"]) == (label, measure)), None)
        if row is None:
            return None
        environment = found["environment"]
        device = environment["gpu"] or f"CPU, {environment['cpu_cores']} cores"
        ours = [digits(report.median_ms(row, each)) if each in row["times_ms"] else "" for each in (ACCELERATED, OURS)]
        peers = (_peer(row, library) for library in report.PEERS)
        table.append([title, device.removeprefix("NVIDIA ").removesuffix(" 80GB HBM3"), *ours, *peers])
        parts.setdefault(wording.hardware(environment), []).append(report.of_rows(found, [row]))
    below = [
        "`jaxgrad.accelerate` runs the unmodified network of the column JAX; the ops of jaxgrad replace those of JAX. "
        "In brackets: the speed-up of `jaxgrad.accelerate`, of the GRU that of the op; below 1 jaxgrad is slower. "
        "Times of one row may be of several runs; a speed-up compares times over those of the ops in the same run.",
        f"JAX is the fastest measured of `jax.lax`, `{LAX_PADDED}`, `{LAX_DILATED}` and `{LAX_SLICED}`, on a CPU also "
        "with the best flags of XLA; for the GRU, `lax.scan`. PyTorch is the fastest measured of eager, "
        "`torch.compile` and, for the GRU, a CUDA graph.",
        *(
            " ".join([f"{device}: {wording.versions(*of)}; measured {wording.dates(*of)}.", *_lacking(of)])
            for device, of in parts.items()
        ),
    ]
    return table, below


def _lacking(of: list[Report]) -> list[str]:
    joined = {**of[0], "rows": [row for each in of for row in each["rows"]]}
    return report.lacking(joined)


def _peer(row: Row, library: str) -> str:
    peer = report.fastest_peer(row, library)
    if peer is None:
        return ""
    mark = " with asymmetric padding only" if library == "JAX" and report.lacks_padded_peer(row) else ""
    speedup = report.speedup(row, library, ACCELERATED if ACCELERATED in row["times_ms"] else OURS)
    return f"{digits(report.median_ms(row, peer))} ({ratio(speedup)}{mark})"
