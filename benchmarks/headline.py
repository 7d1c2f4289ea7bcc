"""The short table of README.md: six rows, chosen by hand, a loss among them."""

from __future__ import annotations

from pathlib import Path

from benchmarks import report, wording
from benchmarks.contender_names import LAX_PADDED
from benchmarks.report import Report, Row
from benchmarks.wording import digits, ratio

# What the reader sees, the report, the case and the pass.
_ROWS = (
    ("3D U-Net training step, bf16", "steps-h200", "unet3d 2x64x64x64 bf16", "training step"),
    ("U-Net training step, bf16", "steps-h200", "unet 16x256x256 bf16", "training step"),
    ("WaveNet (causal) training step, bf16", "steps-h200", "wavenet-causal 8x16384 bf16", "training step"),
    ("ResNet-50 training step, bf16", "steps-h200", "resnet50 64x224x224 bf16", "training step"),
    ("small ResNeXt training step, f32", "steps-cpu", "resnext 8x32x32", "training step"),
    ("GRU (T=500, H=128), forward + backward, TF32", "gru-h200", "500,16,64,128 lbr=1", "forward+backward"),
)


def lines(results: Path) -> tuple[list[list[str]], list[str]] | None:
    """The table and the facts below it; None where a report or a row is missing."""
    table = [["workload", "device", "jaxgrad (ms)", "JAX (ms)", "PyTorch (ms)"]]
    parts: dict[str, list[Report]] = {}
    for title, name, label, measure in _ROWS:
        path = results / f"{name}.json"
        found = report.load(path) if path.exists() else {"rows": []}
        row = next((r for r in found["rows"] if (r["label"], r["measure"]) == (label, measure)), None)
        if row is None:
            return None
        environment = found["environment"]
        device = environment["gpu"] or f"CPU, {environment['cpu_cores']} cores"
        cells = [digits(report.median_ms(row)), *(_peer(row, library) for library in report.PEERS)]
        table.append([title, device.removeprefix("NVIDIA "), *cells])
        parts.setdefault(wording.hardware(environment), []).append(report.of_rows(found, [row]))
    below = [
        "In brackets: the speed-up of jaxgrad, below 1 where jaxgrad is slower. "
        f"JAX is `jax.lax`; for causal padding, the faster of `jax.lax` and `{LAX_PADDED}`; for the GRU, `lax.scan`. "
        "PyTorch is the fastest measured of eager, `torch.compile` and, for the GRU, a CUDA graph.",
        *(f"{device}: {wording.versions(*of)}; measured {wording.dates(*of)}." for device, of in parts.items()),
    ]
    return table, below


def _peer(row: Row, library: str) -> str:
    peer = report.fastest_peer(row, library)
    if peer is None:
        return ""
    mark = " with asymmetric padding only" if library == "JAX" and report.lacks_padded_peer(row) else ""
    return f"{digits(report.median_ms(row, peer))} ({ratio(report.speedup(row, library))}{mark})"
