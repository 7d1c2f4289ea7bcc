"""Writes the tables of README.md and docs/, from the reports in benchmarks/results.

The table of results/gru-cpu.json goes between `<!-- benchmark gru-cpu -->` and `<!-- /benchmark -->`, the short table
of headline.py between `<!-- benchmark headline -->` and the same end. A section without a report stays as it is.

A heading in the marker, as in `<!-- benchmark gru-h100-80gb-hbm3: ### GRU on an H100 -->`, is written above the table,
with the chart of that name if there is one: without a report, the page does not show such a section.

A word after the name, as in `<!-- benchmark conv-h200 transposed -->`, selects the rows of a part (`_PARTS`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path

from benchmarks import gru_table, headline, report, wording
from benchmarks.contender_names import (
    ACCELERATED,
    LAX_PADDED,
    MATRIX_PRODUCT,
    ONE_DEVICE,
    ORDER,
    OURS,
    OURS_ON_XLA,
    PEERS,
)
from benchmarks.report import Report, Row
from benchmarks.wording import digits, ratio

_SECTION = re.compile(
    r"(?P<marker><!-- benchmark (?P<name>[\w-]+)(?: (?P<part>\w+))?(?:: (?P<heading>#+ [^\n]*))? -->\n).*?"
    r"(?P<end><!-- /benchmark -->)",
    re.DOTALL,
)
_PARTS: dict[str, Callable[[Row], bool]] = {
    "transposed": lambda row: row["settings"]["transposed"],
    "others": lambda row: not row["settings"]["transposed"],
    "steps": lambda row: row["measure"] == "training step",
    "calls": lambda row: row["measure"] != "training step",
}
_PRODUCT = f"{MATRIX_PRODUCT} (ms, jaxgrad / {MATRIX_PRODUCT})"  # the header of a column
_SLOWER = 0.9  # a speed-up below it is in the tables, whatever the case
_UNPADDED = "\\*"  # marks a speed-up that lacks the peer with jnp.pad
_OTHER_RUN = "†"  # marks a time of another run than jaxgrad's


def update(files: Iterable[Path], results: Path) -> tuple[list[str], list[str]]:
    """Rewrites the marked sections of Markdown files; returns the names of those, and of those that lack a report."""
    written: list[str] = []
    missing: list[str] = []

    def section(file: Path, match: re.Match[str]) -> str:
        name, heading = match["name"], match["heading"]
        text = _headline(results) if name == "headline" else _table(results, name, match["part"])
        (missing if text is None else written).append(name)
        if text is None:
            return match[0]
        above = [match["marker"].rstrip()]
        if heading:
            above.append(heading)
            charts = (f"{folder}charts/{name}.png" for folder in ("", "../"))
            above += [f"![{heading.lstrip('# ')}]({chart})" for chart in charts if (file.parent / chart).exists()]
        return "\n\n".join([*above, f"{text}\n{match['end']}"])

    for file in files:
        file.write_text(_SECTION.sub(partial(section, file), file.read_text()))
    return written, missing


def _headline(results: Path) -> str | None:
    found = headline.lines(results)
    return None if found is None else _markdown(*found)


def _table(results: Path, name: str, part: str | None) -> str | None:
    path = results / f"{name}.json"
    if not path.exists():
        return None
    found = report.load(path)
    return markdown(report.of_rows(found, list(filter(_PARTS[part], found["rows"]))) if part else found)


def markdown(results: Report) -> str:
    """The table without the extra rows, and below it a list of what a reader must know."""
    hidden = _hidden(results)
    return _markdown(lines(results, [row for row in results["rows"] if row["label"] not in hidden]), facts(results))


def _hidden(results: Report) -> set[str]:
    """The extra cases in which no pass has a speed-up below `_SLOWER`."""
    slower = {
        row["label"]
        for row in results["rows"]
        if any((report.speedup(row, library) or math.inf) < _SLOWER for library in PEERS)
    }
    return {row["label"] for row in results["rows"] if row["extra"]} - slower


def text(results: Report) -> str:
    """The table of all rows, for a terminal."""
    table = lines(results, results["rows"])
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    padded = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in table]
    return "\n".join([*(line.rstrip() for line in padded), "", *facts(results)])


def _markdown(table: list[list[str]], below: list[str]) -> str:
    first, *rest = table
    words = ("case", "pass", "workload", "device")
    marked = [first, [":--" if name in words else "--:" for name in first], *rest]
    return "\n".join([*(f"| {' | '.join(line)} |" for line in marked), "", *(f"- {line}" for line in below), ""])


def lines(results: Report, rows: list[Row]) -> list[list[str]]:
    """The header, then one line for each case or for each row."""
    if results.get("layout") == "gru":
        return gru_table.lines(rows)
    return _line_a_case(rows) if results.get("one_line_a_case") else _line_a_row(results, rows)


def _line_a_case(rows: list[Row]) -> list[list[str]]:
    measures = list(dict.fromkeys(row["measure"] for row in rows))
    found = {(row["label"], row["measure"]): row for row in rows}
    labels = dict.fromkeys(row["label"] for row in rows)
    with_product = any(MATRIX_PRODUCT in row["times_ms"] for row in rows)
    return [
        ["case", *map(wording.pass_name, measures), *[_PRODUCT] * with_product],
        *(
            [n, *(_cell(found[n, m]) for m in measures), *[_product([found[n, m] for m in measures])] * with_product]
            for n in labels
        ),
    ]


def _cell(row: Row) -> str:
    return f"{digits(report.median_ms(row))} ({', '.join(_speedup(row, library) for library in PEERS)})"


def _product(passes: Sequence[Row]) -> str:
    """The times of the matrix product, and how many times longer jaxgrad takes; empty without one."""
    medians = [report.median_ms(row, MATRIX_PRODUCT) if MATRIX_PRODUCT in row["times_ms"] else None for row in passes]
    if not any(medians):
        return ""
    times = " / ".join("-" if ms is None else digits(ms) for ms in medians)
    return f"{times} ({' / '.join(ratio(report.over(row, MATRIX_PRODUCT)) for row in passes)})"


def _speedup(row: Row, library: str, ours: str = "") -> str:
    mark = _UNPADDED if library == "JAX" and report.lacks_padded_peer(row) else ""
    return ratio(report.speedup(row, library, ours) if not ours or ours in row["times_ms"] else None) + mark


def _time(row: Row, name: str) -> str:
    """Empty in a row without the contender."""
    if name not in row["times_ms"]:
        return ""
    return digits(report.median_ms(row, name)) + _OTHER_RUN * _of_other_run(row, name)


def _of_other_run(row: Row, name: str) -> bool:
    runs = row.get("runs", {})
    return runs.get(name) != runs.get(report.reference(row))


def _line_a_row(results: Report, rows: list[Row]) -> list[list[str]]:
    names = report.contenders(results)
    libraries = [library for library, those in PEERS.items() if set(those) & set(names)]
    ours = [name for name in (OURS, ACCELERATED) if name in names]
    of_both = f": {' / '.join(ours)}" if len(ours) > 1 else ""
    several = len({row["measure"] for row in rows}) > 1
    scaled = "throughput_over_one_device" in rows[0]
    header = [
        "case",
        *(["pass"] if several else []),
        *(f"{name} (ms)" for name in names),
        *(f"speed-up over {library}{of_both}" for library in libraries),
        *(f"throughput over one device, {name}" for name in rows[0].get("throughput_over_one_device", {})),
        "roofline (ms)",
        f"{_memory_kind(rows)} (MB): {' / '.join(_with_memory(rows))}",
    ]
    table = [header]
    for row in rows:
        table.append(
            [
                row["label"],
                *([wording.pass_name(row["measure"])] if several else []),
                *(_time(row, name) for name in names),
                *(" / ".join(_speedup(row, library, name) for name in ours) for library in libraries),
                *(ratio(value) for value in (row["throughput_over_one_device"].values() if scaled else ())),
                digits(row["floor_ms"]),
                " / ".join(digits(_memory(row)[n] / 1e6) if n in _memory(row) else "-" for n in _with_memory(rows)),
            ]
        )
    return table


def _memory(row: Row) -> dict[str, int]:
    return row.get("peak_bytes") or row["temporary_bytes"]


def _memory_kind(rows: list[Row]) -> str:
    return "peak memory" if any(row.get("peak_bytes") for row in rows) else "temporary memory"


def _with_memory(rows: list[Row]) -> list[str]:
    """The contenders whose memory is known, but for those on one of several devices."""
    found = {name for row in rows for name in _memory(row)}
    return [name for name in ORDER if name in found and not name.endswith(ONE_DEVICE)]


def facts(results: Report) -> list[str]:
    """Device, versions and date; then what is special about these rows."""
    rows = results["rows"]
    platform = [
        wording.devices(results),
        wording.versions(results),
        f"measured {wording.dates(results)}",
    ]
    if precision := wording.precision(results):
        platform.append(precision)
    found = ["; ".join(platform) + "."]
    settings = results["environment"].get("settings")
    if settings:
        found.append("jaxgrad.config: " + ", ".join(f"{name}={value!r}" for name, value in settings.items()) + ".")
    if results.get("one_line_a_case"):
        found.append("Each cell: jaxgrad's time in ms (speed-up over JAX, speed-up over PyTorch).")
        found.append(f"Geometric means over all {len({row['label'] for row in rows})} cases: {_means(rows)}.")
    if results.get("layout") == "gru":
        found += gru_table.facts(results)
    found += _over_products(rows)
    if results["op"] == "conv":
        found += _over_rooflines(rows)
    if selected := wording.selected(results):
        found.append(f"jaxgrad selected (number of cases) {'; '.join(selected)}.")
    if hidden := _hidden(results):
        path = f"benchmarks/results/{report.name(results)}.json"
        found.append(f"Not in this table: {len(hidden)} cases in {path}, none with a speed-up below {_SLOWER}.")
    if any(map(report.lacks_padded_peer, rows)):
        shown = any(row["label"] not in hidden for row in rows if report.lacks_padded_peer(row))
        mark = f"{_UNPADDED} " if shown else ""
        found.append(f"{mark}Causal cases: `{LAX_PADDED}` was not measured, only asymmetric padding in `jax.lax`.")
    found += report.lacking(results)
    if any(map(report.of_several_runs, rows)):
        in_lines = results.get("one_line_a_case") or results.get("layout") == "gru"
        found.append(
            "Some rows join contenders of several runs; each speed-up compares times of one run."
            if in_lines
            else f"{_OTHER_RUN} Of another run than jaxgrad's: ratios are over the time of jaxgrad in that run."
        )
    if losses := results.get("losses"):
        found.append(_difference(losses))
    return [*found, *_left_out(results)]


def _left_out(results: Report) -> list[str]:
    """Contenders that are left out of several rows for one reason are named once."""
    rows: dict[tuple[str, str], list[str]] = {}
    for name, reason in results["left_out"].items():
        rows.setdefault((name.split(", of ")[0], reason), []).append(name)
    return [
        "jaxgrad runs on XLA here."
        if names == [OURS_ON_XLA]
        else f"Left out: {names[0] if len(names) == 1 else f'{contender}, of {len(names)} rows'} ({reason})."
        for (contender, reason), names in rows.items()
    ]


def _means(rows: list[Row]) -> str:
    found = []
    for measure in dict.fromkeys(row["measure"] for row in rows):
        those = [row for row in rows if row["measure"] == measure and not report.lacks_padded_peer(row)]
        means = []
        for library in PEERS:
            ratios = [value for row in those if (value := report.speedup(row, library)) is not None]
            if ratios:
                means.append(f"{ratio(report.geometric_mean(ratios))} over {library}")
        found.append(f"{wording.pass_name(measure)} {' and '.join(means)}")
    return "; ".join(found)


def _over_products(rows: list[Row]) -> list[str]:
    """Of each pass, how many times longer jaxgrad takes than the matrix product."""
    count = len({row["label"] for row in rows if MATRIX_PRODUCT in row["times_ms"]})
    start = f"Time of jaxgrad over that of the {MATRIX_PRODUCT}, geometric means over {count} cases"
    found = _means_and_most(rows, lambda row: report.over(row, MATRIX_PRODUCT))
    return [f"{start}: {found}."] if found else []


def _over_rooflines(rows: list[Row]) -> list[str]:
    """Of each pass of the depthwise convolutions, how many times longer jaxgrad takes than the roofline.

    Less than once where data is in a cache.
    """
    rows = [row for row in rows if 1 < row["settings"].get("groups", 1) == row["settings"]["features"]]
    count = len({row["label"] for row in rows})
    start = f"Depthwise, time of jaxgrad over the roofline, geometric means over {count} cases"
    found = _means_and_most(rows, lambda row: row["jaxgrad_over_floor"])
    return [f"{start}: {found}."] if found else []


def _means_and_most(rows: list[Row], over: Callable[[Row], float | None]) -> str:
    """The geometric mean and the largest of the ratios of each pass; empty without one."""
    found = []
    for measure in dict.fromkeys(row["measure"] for row in rows):
        ratios = {row["label"]: value for row in rows if row["measure"] == measure and (value := over(row)) is not None}
        if ratios:
            most = max(ratios, key=lambda label: ratios[label])
            mean = ratio(report.geometric_mean(ratios.values()))
            found.append(f"{wording.pass_name(measure)} {mean}, at most {ratio(ratios[most])} ({most})")
    return "; ".join(found)


def _difference(losses: dict[str, list[float]]) -> str:
    one, many = losses.values()
    worst = max(abs(b / a - 1) for a, b in zip(one, many, strict=True))
    return f"The losses of {len(one)} float32 steps on one device and on all devices differ by at most {worst:.0e}."
