"""Brings the results into README.md, so that its tables are those of the JSON files.

The table of results/gru-cpu.json goes between `<!-- benchmark gru-cpu -->` and `<!-- /benchmark -->`.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from benchmarks import report

_SECTION = re.compile(r"(<!-- benchmark (?P<name>[\w-]+) -->\n).*?(<!-- /benchmark -->)", re.DOTALL)


def update(readme: Path, results: Path) -> list[str]:
    """Rewrites every marked section of `readme` and returns the sections' names."""
    names: list[str] = []

    def section(match: re.Match[str]) -> str:
        names.append(match["name"])
        return match[1] + markdown(json.loads((results / f"{match['name']}.json").read_text())) + match[3]

    text = _SECTION.sub(section, readme.read_text())
    if not names:
        raise ValueError(f"{readme}: found no line <!-- benchmark NAME --> that <!-- /benchmark --> follows")
    readme.write_text(text)
    return names


def markdown(results: dict[str, Any]) -> str:
    """The table without the extra rows, and below it what a reader must know."""
    header = report.header(results)
    lines = [header, [":--", ":--", *["--:"] * (len(header) - 2)]]
    lines += [report.cells(results, row) for row in results["rows"] if not row["extra"]]
    table = "".join("| " + " | ".join(line) + " |\n" for line in lines)
    return f"\n{table}\n{' '.join(report.explanation(results))}\n\n"
