"""Brings the results into README.md, so that its tables are those of the JSON files.

The table of results/gru-cpu.json goes between `<!-- benchmark gru-cpu -->` and `<!-- /benchmark -->`. A section
stays as it is while its results are not there.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from benchmarks import report

_SECTION = re.compile(r"(<!-- benchmark (?P<name>[\w-]+) -->\n).*?(<!-- /benchmark -->)", re.DOTALL)


def update(readme: Path, results: Path) -> tuple[list[str], list[str]]:
    """Rewrites the marked sections of `readme`; returns the names of those, and of those that have no results."""
    names: list[str] = []
    without: list[str] = []

    def section(match: re.Match[str]) -> str:
        found = results / f"{match['name']}.json"
        (names if found.exists() else without).append(match["name"])
        return match[1] + markdown(json.loads(found.read_text())) + match[3] if found.exists() else match[0]

    text = _SECTION.sub(section, readme.read_text())
    if not names:
        raise ValueError(f"{readme}: found no line <!-- benchmark NAME --> that <!-- /benchmark --> follows")
    readme.write_text(text)
    return names, without


def markdown(results: dict[str, Any]) -> str:
    """The table without the extra rows, and below it what a reader must know."""
    lines = _by_case(results) if results.get("one_line_a_case") else _by_row(results)
    header, *rows = lines
    table = [header, [":--" if name in ("case", "pass") else "--:" for name in header], *rows]
    text = "".join("| " + " | ".join(line) + " |\n" for line in table)
    return f"\n{text}\n{' '.join(report.explanation(results))}\n\n"


def _by_row(results: dict[str, Any]) -> list[list[str]]:
    return [report.header(results), *(report.cells(results, row) for row in results["rows"] if not row["extra"])]


def _by_case(results: dict[str, Any]) -> list[list[str]]:
    """One line a case: for each pass jaxgrad's time and, in brackets, the ratios of the others."""
    rows = [row for row in results["rows"] if not row["extra"]]
    passes = list(dict.fromkeys(row["measure"] for row in rows))
    found = {(row["label"], row["measure"]): row for row in rows}
    peers = report.contenders(results)[1:]
    header = ["case", *(f"{name}, ms ({', '.join(peers)})" for name in passes)]
    labels = dict.fromkeys(row["label"] for row in rows)
    return [header, *([label, *(_times(found[label, name], peers) for name in passes)] for label in labels)]


def _times(row: dict[str, Any], peers: list[str]) -> str:
    ours, ratios = report.digits(row["times_ms"][report.OURS]["median"]), row["times_slower_than_jaxgrad"]
    return f"{ours} ({', '.join(report.digits(ratios[p]) + 'x' if p in ratios else '-' for p in peers)})"
