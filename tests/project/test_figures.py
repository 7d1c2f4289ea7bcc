"""Every measurement in the prose of README.md and docs/ comes from a file of the repository.

A figure outside of the tables that `python -m benchmarks tables` writes has a comment in its paragraph, list item or
row of a table, or in a line of its own before that. There are three kinds:

  <!-- from steps-h200; JAX / jaxgrad; resnet50 -->  of benchmarks/results/steps-h200.json: the time of JAX over that
    of jaxgrad, in the rows whose case and pass match the expression. Without a slash, the times in ms.
  <!-- from table gpu; small, without groups -->  the rows of this name in jaxgrad/_src/choice/tables.
  <!-- set in benchmarks/preferences.py; _MIN_GAIN = 1.03 -->  no measurement, but a limit: the file has this text.

A figure must be the least, the largest or the geometric mean of the values, rounded as it is written. Percent are what
a value is above 1, or below 1 in a sentence that says that something is less.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import benchmarks_package  # noqa: F401
import pytest

from benchmarks import report, tables
from benchmarks.contender_names import GRU_PEERS, OURS, PEERS, TORCH_EAGER
from benchmarks.report import Row

_ROOT = Path(__file__).parents[2]
_RESULTS = _ROOT / "benchmarks" / "results"
_TABLES = _ROOT / "jaxgrad" / "_src" / "choice" / "tables"
PAGES = [_ROOT / "README.md", *sorted((_ROOT / "docs").rglob("*.md"))]

# Code and its output, which test_pages.py compares, and generated tables.
_NOT_PROSE = re.compile(
    r"^ *```(?!text).*?^ *```$(\s*^```text$.*?^```$)?|<!-- benchmark .*?<!-- /benchmark -->", re.M | re.S
)
_CODE_OR_TARGET = re.compile(r"`[^`]*`|(?<=\])\([^)]*\)")
_COMMENT = re.compile(r"<!-- (from|set in) (.*?) -->", re.S)
_ITEM = re.compile(r"\s*([-|]|\d+\.) ")
_UNIT = (
    r"x(?![\w-])| ?%| times\b| of the times?\b| as (?:fast|long)\b"
    r"| ?([num]s|µs|s|seconds?|minutes?|hours?|[kKMGT]i?B|TFLOP)(/s)?\b(?!-)"
)
_NUMBER = r"(?<![\w.,/^])\d+(?:,\d{3})*(?:\.\d+)?"
_FIGURES = re.compile(rf"({_NUMBER}(?:(?:,| to| and| or| /) {_NUMBER})*)({_UNIT})")
_LESS = re.compile(r"\b(saves?|less|fewer|shorter)\b")
_WORDS = ("twice", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
_IN_WORDS = re.compile(rf"\b({'|'.join(_WORDS)})(?=(?: to \w+)?(?: times)? as (?:fast|long|slow))")
_DECIMAL = re.compile(r"(?<![\w.,/^])\d+\.\d+(?![\w.]*\w)")  # no version of three parts
_DECIMAL_CELL = re.compile(r"(?<=\|) *(\d+\.\d+)(?= *[|(/])")  # its unit is in the header of the table


def blocks(text: str) -> Iterator[str]:
    """The paragraphs, list items and rows of tables, each with the comments before it."""
    comments = ""
    for paragraph in re.split(r"\n\s*\n", _NOT_PROSE.sub("\n\n", text)):
        if not _COMMENT.sub("", paragraph).strip():
            comments += paragraph
            continue
        items: list[str] = []
        for line in paragraph.splitlines():
            if items and not _ITEM.match(line):
                items[-1] += f"\n{line}"
            else:
                items.append(line)
        yield from (comments + item for item in items)
        comments = ""


def figures(block: str) -> list[tuple[str, str]]:
    """The numbers that are measurements, with their units: "% less" in a sentence that says so."""
    prose = _CODE_OR_TARGET.sub("", _COMMENT.sub("", block))
    prose = _IN_WORDS.sub(lambda match: str(max(2, 1 + _WORDS.index(match[1]))), prose)
    found = []
    for sentence in re.split(r"(?<=[.;]) ", " ".join(prose.split())):
        less = " less" if _LESS.search(sentence) else ""
        for match in _FIGURES.finditer(sentence):
            unit = match[2].strip()
            found += [(number, unit + less * (unit == "%")) for number in re.findall(_NUMBER, match[1])]
    # "1.46 times as fast on one GPU, 1.33 on another"
    others = _DECIMAL.findall(prose) if found else _DECIMAL_CELL.findall(prose)
    return found + [(number, "") for number in others if number not in dict(found)]


def _time(row: Row, name: str) -> float | None:
    """Over that of jaxgrad, or of accelerate where the row lacks it, in one run."""
    peer = report.fastest_peer(row, name) if name in {**PEERS, **GRU_PEERS} else name
    return {report.reference(row): 1.0, **row["times_slower_than_jaxgrad"]}.get(peer)


def values(kind: str, source: str) -> list[float]:
    """Those that a comment names."""
    name, *rest = " ".join(source.split()).split("; ")
    if kind == "set in":
        assert rest[0] in (_ROOT / name).read_text(), f"{name} lacks {rest[0]}"
        return [float(number) for number in re.findall(r"[\d.]+", rest[0])]
    if name.startswith("table "):
        every = json.loads((_TABLES / f"{name.removeprefix('table ')}.json").read_text())["rows"]
        measured = [row["measured"] for row in every if row["name"] == rest[0]]
        assert measured, f"{name} has no such rows: {source}"
        return [row[key] for row in measured for key in ("ratio", "least")]
    rows = report.load(_RESULTS / f"{name}.json")["rows"]
    rows = [row for row in rows if re.search(rest[1], f"{row['label']}, {row['measure']}")]
    over, slash, under = rest[0].partition(" / ")
    if slash:
        times = [(_time(row, over), _time(row, under)) for row in rows]
        found = [a / b for a, b in times if a is not None and b is not None]
    else:
        found = [report.median_ms(row, over) for row in rows if over in row["times_ms"]]
    assert found, f"{name} has no such rows: {source}"
    return [min(found), max(found), report.geometric_mean(found)]


def is_one_of(number: str, unit: str, found: list[float]) -> bool:
    """Whether the number is one of the values, rounded; in percent, by how much one of them is above or below 1."""
    decimals = len(number.partition(".")[2])
    value = float(number.replace(",", ""))
    those = {
        "%": [100 * (each - 1) for each in found],
        "% less": [100 * (1 - each) for each in found],
    }.get(unit, found)
    return any(abs(each - value) <= 0.5 * 10**-decimals + 1e-3 for each in those)


def complaints(text: str) -> list[str]:
    found = []
    for block in blocks(text):
        of_sources = [value for source in _COMMENT.findall(block) for value in values(*source)]
        has = f"the sources have {', '.join(f'{value:.4g}' for value in of_sources)}" if of_sources else "no source"
        for number, unit in figures(block):
            if not is_one_of(number, unit, of_sources):
                found.append(f"{number} {unit}: {has}, for: {' '.join(block.split())[:100]}")
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(_ROOT)))
def test_every_figure_has_a_source(page):
    found = complaints(page.read_text())
    assert not found, "\n".join(found)


def test_tables_are_those_of_the_results(tmp_path):
    shutil.copy(_ROOT / "README.md", tmp_path)
    shutil.copytree(_ROOT / "docs", tmp_path / "docs")
    copies = [tmp_path / page.relative_to(_ROOT) for page in PAGES]
    tables.update(copies, _RESULTS)
    for page, copy in zip(PAGES, copies, strict=True):
        assert page.read_text() == copy.read_text(), f"python -m benchmarks tables changes {page.name}"


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("It is 3.3 times as fast.", 1),
        ("It is twice as fast, and two to five times as fast as another.", 3),
        ("It is compiled three times.", 0),
        ("It takes 0.90 to 1.00 times as long, 2.5 ms, 132 MB, 3x and 4 %.", 6),
        ("| a | 36.7 |\n| b | 3.7.2 |", 1),
        ("A 3x3 window, version 0.10, `5 ms`, 8x32x32 and 2^28.\n\n```\n5 ms\n```", 0),
        ("<!-- benchmark a -->\n| 5.0 ms |\n<!-- /benchmark -->", 0),
        ("- 2.0x <!-- from steps-cpu; PyTorch / jaxgrad; small -->\n- 3.0x", 1),
        ("<!-- from steps-cpu; PyTorch / jaxgrad; small -->\n\n2.0 times\n\n2.0 times", 1),
        ("2.0x <!-- from steps-cpu; PyTorch / jaxgrad; small --> 3.1x", 1),
        ("10 % <!-- from steps-cpu; PyTorch / jaxgrad; large -->, 12 %", 1),
        ("10 % <!-- from steps-cpu; jaxgrad / PyTorch; large -->, 9 %", 2),
        ("It saves 10 % <!-- from steps-cpu; jaxgrad / PyTorch; large -->, or 9 %", 1),
        ("200 ms, 201 ms <!-- from steps-cpu; jaxgrad; large -->", 1),
        ("1.32 times, or 0.74, or 0.75 <!-- from table gpu; small, without groups -->", 1),
        ("3 %, or 4 % <!-- set in benchmarks/preferences.py; _MIN_GAIN = 1.03 -->", 1),
    ],
)
def test_figures_without_a_source(monkeypatch, text, count):
    monkeypatch.setattr(report, "load", lambda _: {"rows": [_row("small", 10, 20), _row("large", 200, 220)]})
    assert len(complaints(text)) == count


def _row(label: str, jaxgrad_ms: float, torch_ms: float) -> Row:
    times = {name: {"median": ms} for name, ms in ((OURS, jaxgrad_ms), (TORCH_EAGER, torch_ms))}
    slower = {TORCH_EAGER: torch_ms / jaxgrad_ms}
    return {"label": label, "measure": "step", "times_ms": times, "times_slower_than_jaxgrad": slower}


def test_a_source_must_exist():
    with pytest.raises(AssertionError, match="no such rows"):
        complaints("3x <!-- from steps-cpu; PyTorch / jaxgrad; no such case -->")
    with pytest.raises(AssertionError, match="no such rows"):
        complaints("3x <!-- from table gpu; no such row -->")
    with pytest.raises(FileNotFoundError):
        complaints("3x <!-- from no-such-file; PyTorch / jaxgrad; mobilenet -->")
    with pytest.raises(AssertionError, match="lacks"):
        complaints("3 % <!-- set in benchmarks/preferences.py; _MIN_GAIN = 2 -->")


@pytest.mark.parametrize("path", sorted(_RESULTS.glob("*.json")), ids=lambda path: path.stem)
def test_every_run_names_the_version_of_jaxgrad(path):
    assert all(run["versions"].get("jaxgrad") for run in report.environments(report.load(path)))
