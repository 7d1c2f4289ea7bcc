"""The results of one op on one platform: a table, a JSON file and a bar plot.

A report is what its JSON file holds: `op`, `environment` (environment.py), `implementation` (what jaxgrad took),
`left_out` (the contenders that are missing, each with the reason), `notes`, and `rows` (compare.py).
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from benchmarks.environment import hardware

OURS = "jaxgrad"
_TEMPORARY = "what a call takes beyond its operands and results"


def name(report: dict[str, Any]) -> str:
    return f"{report['op']}-{report['environment']['platform']}"


def contenders(report: dict[str, Any]) -> list[str]:
    """The names of all contenders, jaxgrad's first."""
    return list(dict.fromkeys(name for row in report["rows"] for name in row["times_ms"]))


def cells(report: dict[str, Any], row: dict[str, Any]) -> list[str]:
    """A row of the table below `header`."""
    found = [row["label"], row["measure"]]
    for contender in contenders(report):
        times, ratio = row["times_ms"].get(contender), row["times_slower_than_jaxgrad"].get(contender)
        found.append("" if times is None else digits(times["median"]) + (f" ({digits(ratio)}x)" if ratio else ""))
    if throughput := row.get("throughput_over_one_device"):
        found.append(" / ".join(f"{digits(ratio)}x" for ratio in throughput.values()))
    found.append(f"{digits(row['floor_ms'])} ({digits(row['jaxgrad_over_floor'])})")
    return [*found, " / ".join(digits(size / 1e6) for size in _sizes(row).values())]


def header(report: dict[str, Any]) -> list[str]:
    scaled = report["rows"][0].get("throughput_over_one_device", {})
    throughput = [f"throughput over one device's ({' / '.join(scaled)})"] if scaled else []
    times = [f"{c}, ms" for c in contenders(report)]
    return ["case", "pass", *times, *throughput, "floor, ms (ours / floor)", "memory, MB"]


def _sizes(row: dict[str, Any]) -> dict[str, int]:
    """Bytes of every contender's memory, at its peak where that is known, then of the arrays to hold them against."""
    return {**(row.get("peak_bytes") or row["temporary_bytes"]), **row["array_bytes"]}


def digits(value: float) -> str:
    """Three significant digits, and every digit before the point."""
    return f"{value:.{max(0, 2 - math.floor(math.log10(value)))}f}" if value > 0 else "0"


def explanation(report: dict[str, Any]) -> list[str]:
    """What a reader of the table must know, in lines."""
    environment = report["environment"]
    versions = ", ".join(f"{k} {v}" for k, v in environment["versions"].items() if v and k != "python")
    settings = ", ".join(f"{name}={value!r}" for name, value in environment.get("settings", {}).items())
    return [
        f"{hardware(environment)}; {versions}; {environment['date']}. {report['implementation']}.",
        *([f"jaxgrad.config: {settings}."] if settings else []),
        "Times are medians; in brackets, how many times jaxgrad's time.",
        *([_means(report)] if report.get("one_line_a_case") else [_memory(report)]),
        *report["notes"],
        *(f"Left out: {name} ({reason})." for name, reason in report["left_out"].items()),
    ]


def _means(report: dict[str, Any]) -> str:
    """Of all rows, those left out of the table too."""
    found = []
    for measure in dict.fromkeys(row["measure"] for row in report["rows"]):
        rows = [row["times_slower_than_jaxgrad"] for row in report["rows"] if row["measure"] == measure]
        means = []
        for contender in contenders(report)[1:]:
            ratios = [row[contender] for row in rows if contender in row]
            means.append(f"{contender} {digits(math.exp(sum(map(math.log, ratios)) / len(ratios)))}x")
        found.append(f"{measure} {', '.join(means)} ({len(rows)} rows)")
    return f"Geometric means of these ratios over all cases in the JSON file: {'; '.join(found)}."


def _memory(report: dict[str, Any]) -> str:
    row = report["rows"][0]
    what = "the most that a step holds" if row.get("peak_bytes") else _TEMPORARY
    return f"Memory is {what}: {' / '.join(_sizes(row))}."


def joined(report: dict[str, Any], later: dict[str, Any]) -> dict[str, Any]:
    """The later of two reports on one op and platform, with the rows of both, the later ones of the same name."""
    rows = {(row["label"], row["measure"]): row for part in (report, later) for row in part["rows"]}
    return {**later, "left_out": {**report["left_out"], **later["left_out"]}, "rows": list(rows.values())}


def print_table(report: dict[str, Any]) -> None:
    lines = [header(report), *(cells(report, row) for row in report["rows"])]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    print("", *explanation(report), "", sep="\n")
    for case, measure, *numbers in lines:
        right = (cell.rjust(width) for cell, width in zip(numbers, widths[2:], strict=True))
        print("  ".join([case.ljust(widths[0]), measure.ljust(widths[1]), *right]))


def save(report: dict[str, Any], folder: Path) -> None:
    """Writes `<op>-<platform>.json`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name(report)}.json").write_text(json.dumps(report, indent=1) + "\n")


def save_plot(report: dict[str, Any], folder: Path, baseline: str) -> None:
    """Writes `<op>-<platform>.png`, whose bars are speed-ups over the contender `baseline`."""
    plot(report, baseline).savefig(folder / f"{name(report)}.png", dpi=120)


def plot(report: dict[str, Any], baseline: str) -> Figure:
    """One panel a pass, one group of bars a case of those that are in the table."""
    shown = [row for row in report["rows"] if not row["extra"]]
    measures = list(dict.fromkeys(row["measure"] for row in shown))
    names = [name for name in contenders(report) if name != baseline]
    width = 0.8 / len(names)
    cases = len(shown) / len(measures)
    figure = Figure(figsize=(3 + 0.9 * cases, 3.2 * len(measures)), layout="constrained")
    for panel, measure in zip(figure.subplots(len(measures), 1, squeeze=False)[:, 0], measures, strict=True):
        rows = [row for row in shown if row["measure"] == measure]
        for i, contender in enumerate(names):
            at = [(k, row) for k, row in enumerate(rows) if contender in row["times_ms"]]
            speedups = [r["times_ms"][baseline]["median"] / r["times_ms"][contender]["median"] for _, r in at]
            bars = panel.bar([k + (i - (len(names) - 1) / 2) * width for k, _ in at], speedups, width, label=contender)
            panel.bar_label(bars, fmt="%.1f", fontsize=7)
        panel.axhline(1, color="black", linewidth=0.8, zorder=0)
        panel.set_xticks(range(len(rows)), [row["label"].replace(" ", "\n", 1) for row in rows], fontsize=7)
        panel.set(title=measure, ylabel=f"speed-up over {baseline}")
        panel.margins(x=0.01, y=0.12)
    figure.axes[0].legend(fontsize=8)
    figure.suptitle(
        f"{report['op']}: {hardware(report['environment'])}, jax {report['environment']['versions']['jax']}"
    )
    return figure
