"""What a reader needs to know of a report, in plain words: device, versions, implementations, units."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Collection
from typing import Any

from benchmarks.contender_names import PEERS
from benchmarks.report import Report, Row, contenders, environments

# The passes of a convolution: the measure, its name, and the names in the answers of jaxgrad.explain, old and new.
_CONV_PASSES = {
    "forward": ("forward", ("forward",)),
    "dX": ("input gradient", ("input_gradient", "backward_input")),
    "dW": ("weight gradient", ("weight_gradient", "backward_filter")),
}
_IMPLEMENTATIONS = {
    "cpu": "jaxgrad's CPU kernel",
    "cuda": "jaxgrad's CUDA kernel",
    "cudnn": "cuDNN",
    "onednn": "oneDNN",
    "xla": "XLA",
}
_PACKAGES = ("jaxgrad", "jax")
_FRAMEWORKS = ("flax", "equinox")


def hardware(environment: dict[str, Any]) -> str:
    if environment["gpu"]:
        return environment["gpu"]
    cpu = re.sub(r"\(R\)|\(TM\)|@.*| (Processor|CPU)\b", "", environment["cpu"]).strip()
    return f"{cpu} ({environment['cpu_cores']} cores)"


def devices(report: Report) -> str:
    """The hardware of all runs."""
    return " and ".join(dict.fromkeys(hardware(environment) for environment in environments(report)))


def versions(*reports: Report) -> str:
    """The versions of all runs, as "jaxgrad 0.1.0, jax 0.11.2, torch 2.11.0", of the packages that were measured."""
    with_torch = any(name in PEERS["PyTorch"] for report in reports for name in contenders(report))
    with_frameworks = any(report["op"] == "models" for report in reports)
    packages = [*_PACKAGES, *["torch"] * with_torch, *_FRAMEWORKS * with_frameworks]
    every = [environment["versions"] for report in reports for environment in environments(report)]
    found = {package: {of.get(package) for of in every} - {None} for package in packages}
    return ", ".join(f"{package} {_range(those)}" for package, those in found.items() if those)


def _range(versions: Collection[str]) -> str:
    """The one version, both, or the first and the last of several."""
    # A release follows its development versions.
    found = sorted(versions, key=lambda version: [*map(int, re.findall(r"\d+", version)), math.inf])
    return " and ".join(found) if len(found) <= 2 else f"{found[0]} to {found[-1]}"


def dates(*reports: Report) -> str:
    found = sorted({environment["date"] for report in reports for environment in environments(report)})
    return found[0] if len(found) == 1 else f"{found[0]} to {found[-1]}"


def precision(report: Report) -> str:
    """What float32 products are computed in, where that is not float32."""
    rounded = any(row["dtype"] == "float32" and row["flops"] for row in report["rows"])
    return "float32 with TF32 products" if rounded and report["environment"]["platform"] == "gpu" else ""


def pass_name(measure: str) -> str:
    return _CONV_PASSES.get(measure, (measure,))[0].replace("forward+backward", "forward + backward")


def selected(report: Report) -> list[str]:
    """For each pass of a convolution, the implementations that jaxgrad selected, and for how many cases."""
    counts: dict[str, Counter[str]] = {measure: Counter() for measure in _CONV_PASSES}
    for row in report["rows"]:
        if "taken" in row:
            counts[row["measure"]][implementation(row)] += 1
    return [
        f"{pass_name(measure)}: {', '.join(f'{name} {n}' for name, n in found.most_common())}"
        for measure, found in counts.items()
        if found
    ]


def implementation(row: Row) -> str:
    """What a convolution's pass runs on, from the answer of `jaxgrad.explain` in `taken`."""
    of_passes = dict(re.findall(r"(\w+): '(\w+)' \(", row["taken"]))
    for name in _CONV_PASSES[row["measure"]][1]:
        if name in of_passes:
            return _IMPLEMENTATIONS[of_passes[name]]
    found = re.search(r" on \w+: '(\w+)'", row["taken"])
    assert found is not None, row["taken"]
    return _IMPLEMENTATIONS[found[1]]


def digits(value: float) -> str:
    """Three significant digits, and every digit before the point."""
    return f"{value:.{max(0, 2 - math.floor(math.log10(value)))}f}" if value > 0 else "0"


def ratio(value: float | None) -> str:
    """As "18x", "5.7x" or "0.88x"; 0.995 is not yet 1."""
    if value is None:
        return "-"
    if value >= 10:
        return f"{value:.0f}x"
    return f"{value:.1f}x" if value >= 1.995 else f"{value:.2f}x"


def brief(error: Exception) -> str:
    """The kind and the first line of an error, with the second one where the first one announces it."""
    lines = str(error).strip().splitlines()
    text = " ".join(lines[: 2 if lines and lines[0].endswith(":") else 1])
    return f"{type(error).__name__}: {text[:200]}" if text else type(error).__name__
