"""The table of the GRU: one line for a case, with both passes in a cell."""

from __future__ import annotations

from typing import Any

from benchmarks import report
from benchmarks.contender_names import CUDNN_RNN_F16, GRU_PEERS, ORDER, OURS_WITHOUT_RESETS, TORCH_GRU_GRAPH
from benchmarks.report import Report, Row
from benchmarks.wording import digits, ratio

_LIBRARIES = ("JAX", "jaxgrad on XLA", "PyTorch", "cuDNN")
_TITLES = {"JAX": "lax.scan", "PyTorch": "torch.nn.GRU"}
_ALGORITHMS = {
    "STANDARD": "standard",
    "PERSIST_STATIC": "static",
    "PERSIST_DYNAMIC": "dynamic",
    "PERSIST_STATIC_SMALL_H": "small H",
}


def lines(rows: list[Row]) -> list[list[str]]:
    """The header, then one line for each case."""
    libraries = [name for name in _LIBRARIES if any(report.fastest_peer(row, name) for row in rows)]
    cases: dict[str, list[Row]] = {}
    for row in rows:
        cases.setdefault(row["label"], []).append(row)
    kernels = any("kernel_us_a_step" in row for row in rows)
    resets = any(OURS_WITHOUT_RESETS in row["times_ms"] for row in rows)
    others = [name for name in ORDER if name != OURS_WITHOUT_RESETS]
    memory = [name for name in others if any(name in row["temporary_bytes"] for row in rows)]
    header = [
        "case",
        "jaxgrad (ms)",
        *(f"{_TITLES.get(name, name)} (ms, speed-up)" for name in libraries),
        *(["cost of resets"] if resets else []),
        *(["kernels, us a step"] if kernels else []),
        "roofline (ms)",
        f"temporary memory (MB): {' / '.join(memory)}",
    ]
    return [header, *(_line(label, those, libraries, resets, kernels, memory) for label, those in cases.items())]


def _line(
    label: str, rows: list[Row], libraries: list[str], resets: bool, kernels: bool, memory: list[str]
) -> list[str]:
    last = rows[-1]  # the pass with the gradients
    steps = last.get("kernel_us_a_step", {})
    return [
        label,
        " / ".join(digits(report.median_ms(row)) for row in rows),
        *(_peer(rows, library) for library in libraries),
        *([_cost_of_resets(rows)] if resets else []),
        *([" / ".join(digits(steps[n]) if n in steps else "-" for n in ("forward", "backward"))] if kernels else []),
        " / ".join(digits(row["floor_ms"]) if "floor_ms" in row else "-" for row in rows),
        " / ".join(digits(last["temporary_bytes"][n] / 1e6) if n in last["temporary_bytes"] else "-" for n in memory),
    ]


def _cost_of_resets(rows: list[Row]) -> str:
    over = [report.over(row, OURS_WITHOUT_RESETS) for row in rows]
    return " / ".join("-" if times is None else f"{100 * (times - 1):.1f} %" for times in over) if any(over) else ""


def _peer(rows: list[Row], library: str) -> str:
    """The times of the fastest contender of each pass, and the speed-ups; for cuDNN the algorithm too."""
    fastest = [report.fastest_peer(row, library) for row in rows]
    if not any(fastest):
        return ""
    pairs = list(zip(rows, fastest, strict=True))
    times = " / ".join(digits(report.median_ms(row, name)) if name else "-" for row, name in pairs)
    speedups = " / ".join(ratio(report.speedup(row, library)) for row in rows)
    names = list(dict.fromkeys(_algorithm(row, name) for row, name in pairs if name in row.get("algorithms", {})))
    return f"{times} ({', '.join([speedups, *([' / '.join(names)] if names else [])])})"


def _algorithm(row: Row, name: str) -> str:
    found: dict[str, Any] = row["algorithms"][name]
    word = _ALGORITHMS[found["fastest"].split(",")[0]]
    return f"f16 {word}" if name == CUDNN_RNN_F16 else word


def facts(results: Report) -> list[str]:
    names = report.contenders(results)
    found = [
        "Each cell: forward / forward + backward; in brackets how many times longer than jaxgrad's times they are."
    ]
    if TORCH_GRU_GRAPH in names:
        found.append("torch.nn.GRU: the faster of eager calls and calls in a CUDA graph.")
    if set(GRU_PEERS["cuDNN"]) & set(names):
        note = "cuDNN: its RNN functions called directly, with the fastest algorithm (named)"
        half = "; for bf16 the faster of bfloat16 and float16 (f16)" if CUDNN_RNN_F16 in names else ""
        found.append(f"{note}{half}.")
    if OURS_WITHOUT_RESETS in names:
        found.append("Cost of resets: how much longer a call takes with `reset` than without.")
    if any("kernel_us_a_step" in row for row in results["rows"]):
        found.append(
            "Kernels: the device time of jaxgrad's CUDA kernels, forward / backward, over the number of steps; none "
            "where jaxgrad runs on XLA."
        )
    return [*found, "Memory: of forward + backward."]
