"""The results of one op on one kind of device: a report, which is one JSON file.

Fields of a report:
  op: the command that measured it, as "steps".
  environment: hardware, versions and date of the latest run (environment.py).
  environments: those of all runs whose rows the report joins; absent where there was one run.
  implementation: what `jaxgrad.explain` answers.
  left_out: the missing contenders, each with the reason.
  notes: how to read the rows.
  one_line_a_case: whether a table has one line for all passes of a case.
  rows: one for each case and pass (compare.py).

With `environments`, each row has `runs`: for each contender the index of its run. Each ratio in
`times_slower_than_jaxgrad` compares times of one run. `superseded` has what other runs measured of the same row, each
with its environment.

The functions here read older reports too. None of them but `save` needs JAX.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.contender_names import (
    ACCELERATED,
    GRU_PEERS,
    LAX,
    LAX_DILATED,
    LAX_FLAGS,
    LAX_PADDED,
    LAX_SLICED,
    ORDER,
    OURS,
    PEERS,
    RENAMED,
)

Report = dict[str, Any]
Row = dict[str, Any]

_BY_CONTENDER = ("times_ms", "times_slower_than_jaxgrad", "temporary_bytes", "peak_bytes", "runs", "algorithms")


def load(path: Path) -> Report:
    """The report, with today's names of the contenders."""
    report = json.loads(path.read_text())
    report["left_out"] = _renamed(report["left_out"])
    for row in report["rows"]:
        row.update({field: _renamed(row[field]) for field in _BY_CONTENDER if field in row})
    return report


def _renamed(values: dict[str, Any]) -> dict[str, Any]:
    return {RENAMED.get(name, name): value for name, value in values.items()}


def save(report: Report, folder: Path) -> Path:
    """Writes `<op>-<device>.json`."""
    from jaxgrad._src.core.files import replace_file

    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name(report)}.json"
    replace_file(path, json.dumps(report, indent=1) + "\n")  # another process may copy the folder meanwhile
    return path


def add(report: Report, folder: Path) -> Report:
    """Joins a report to its file, under a lock. Returns the joined report."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name(report)}.json"
    lock = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        both = joined(load(path), report) if path.exists() else report
        save(both, folder)
    finally:
        fcntl.flock(lock, fcntl.LOCK_UN)  # also where a child process has inherited it
        os.close(lock)
    return both


def name(report: Report) -> str:
    return file_name(report["op"], report["environment"]["gpu"])


def file_name(op: str, gpu: str | None) -> str:
    """The name of a report's file: "conv-h200" for the "NVIDIA H200", "conv-cpu" without a GPU."""
    return f"{op}-{gpu.removeprefix('NVIDIA ').replace(' ', '-').lower()}" if gpu else f"{op}-cpu"


def contenders(report: Report) -> list[str]:
    """The names of all contenders, in the order of columns, with unknown ones last."""
    found = dict.fromkeys(name for row in report["rows"] for name in row["times_ms"])
    return [*(name for name in ORDER if name in found), *(name for name in found if name not in ORDER)]


def environments(report: Report) -> list[dict[str, Any]]:
    return report.get("environments") or [report["environment"]]


def median_ms(row: Row, contender: str = OURS) -> float:
    return row["times_ms"][contender]["median"]


def fastest_peer(row: Row, library: str) -> str | None:
    """The fastest contender of "JAX", "PyTorch" or a key of GRU_PEERS in the row; None where the row has none."""
    found = [name for name in {**PEERS, **GRU_PEERS}[library] if name in row["times_ms"]]
    return min(found, key=row["times_slower_than_jaxgrad"].__getitem__, default=None)


def reference(row: Row) -> str:
    """The contender that `times_slower_than_jaxgrad` is over."""
    return OURS if OURS in row["times_ms"] else ACCELERATED


def speedup(row: Row, library: str, ours: str = "") -> float | None:
    """How many times longer the fastest contender of a library takes than `ours`, by default the `reference`.

    Where the two are of different runs, the time of each is over that of the reference in its run.
    """
    peer, slower = fastest_peer(row, library), {reference(row): 1, **row["times_slower_than_jaxgrad"]}
    return slower[peer] / slower[ours or reference(row)] if peer is not None else None


def over(row: Row, name: str) -> float | None:
    """How many times longer jaxgrad takes than a contender; None in a row without it."""
    if name not in row["times_ms"]:
        return None
    runs = row.get("runs", {})
    if runs.get(OURS) == runs.get(name):
        return median_ms(row) / median_ms(row, name)
    return 1 / row["times_slower_than_jaxgrad"][name]  # which compares times of one run


def of_several_runs(row: Row) -> bool:
    return len(set(row.get("runs", {}).values())) > 1


def lacks_padded_peer(row: Row) -> bool:
    """Whether the row has asymmetric padding, and only the peer that hands it to jax.lax."""
    return "causal" in row["label"] and LAX in row["times_ms"] and LAX_PADDED not in row["times_ms"]


# Of networks and models.
_TRANSPOSED = ("unet", "unet3d", "linen-unet", "linen-unet3d", "equinox-autoencoder")
_POOLED = ("unet", "unet3d", "resnet18", "resnet50", "resnext50")


def lacking(report: Report) -> list[str]:
    """What a reader must know of peers that are newer than some rows."""
    rows, found = [row for row in report["rows"] if LAX in row["times_ms"]], []
    on_cpu = report["environment"]["platform"] == "cpu"
    if on_cpu and LAX_FLAGS not in report["left_out"]:
        count = sum(LAX_FLAGS not in row["times_ms"] for row in rows)
        if count:
            found.append(
                f"`{LAX_FLAGS}`, which may be many times as fast as `{LAX}`, was not measured in {count} of "
                f"{len(rows)} rows: their speed-ups are over the default flags of XLA."
            )
    if count := sum(LAX_DILATED not in row["times_ms"] for row in rows if _has_transposed(row["settings"])):
        # On an H200 it was as fast as jax.lax in the value and the weight gradient, and slower in the input gradient.
        faster = f", which may be many times as fast as `{LAX}` in transposed convolutions," if on_cpu else ""
        found.append(
            f"`{LAX_DILATED}`{faster} was not measured in {count} row{'s' * (count > 1)} with transposed convolutions."
        )
    if count := sum(LAX_SLICED not in row["times_ms"] for row in rows if row["settings"].get("network") in _POOLED):
        found.append(
            f"In {count} row{'s' * (count > 1)}, max pooling was the maximum of slices in all of JAX, of which XLA's "
            "gradient is faster than that of `lax.reduce_window`."
        )
    return found


def _has_transposed(settings: dict[str, Any]) -> bool:
    is_dilated = settings.get("transposed") and settings["stride"] > 1
    return bool(is_dilated) or settings.get("network", settings.get("model")) in _TRANSPOSED


def geometric_mean(values: Iterable[float]) -> float:
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs))


def of_rows(report: Report, rows: list[Row]) -> Report:
    """The part of a report with these rows of it, and the environments of their runs."""
    every = environments(report)
    runs = [_in_runs(row, range(len(every))) for row in rows]
    return _without_unused_runs({**report, "rows": runs}, every)


def joined(report: Report, later: Report) -> Report:
    """The later of two reports on one op and platform, with the rows of both.

    A row that both have is the later one, with the contenders that only the earlier one has.
    """
    runs, later_runs = environments(report), environments(later)
    all_runs = [*runs, *(run for run in later_runs if run not in runs)]
    later_in_all = [all_runs.index(run) for run in later_runs]
    rows = _by_case(_in_runs(row, range(len(runs))) for row in report["rows"])
    for key, row in _by_case(_in_runs(row, later_in_all) for row in later["rows"]).items():
        rows[key] = _with_missing(row, rows.get(key))
    joined_rows = list(rows.values())
    left_out = _left_out(report, later, joined_rows)
    return _without_unused_runs({**later, "left_out": left_out, "rows": joined_rows}, all_runs)


def _in_runs(row: Row, numbers: Sequence[int]) -> Row:
    """The row with the run of each contender, renumbered: run i becomes `numbers[i]`."""
    runs = row.get("runs") or dict.fromkeys(row["times_ms"], 0)
    return {**row, "runs": {name: numbers[run] for name, run in runs.items()}}


def _with_missing(row: Row, earlier: Row | None) -> Row:
    if earlier is None:
        return row
    merged = {field: {**earlier.get(field, {}), **row.get(field, {})} for field in _BY_CONTENDER}
    return {**row, **{field: values for field, values in merged.items() if values}}


def _without_unused_runs(report: Report, runs: list[dict[str, Any]]) -> Report:
    used = sorted({run for row in report["rows"] for run in row["runs"].values()})
    if len(used) == 1:
        rows = [{k: v for k, v in row.items() if k != "runs"} for row in report["rows"]]
        single = {key: value for key, value in report.items() if key != "environments"}
        return {**single, "environment": runs[used[0]], "rows": rows}
    rows = [{**row, "runs": {name: used.index(run) for name, run in row["runs"].items()}} for row in report["rows"]]
    return {**report, "environments": [runs[run] for run in used], "rows": rows}


def _left_out(report: Report, later: Report, rows: list[Row]) -> dict[str, str]:
    """What either report leaves out, unless the later one measured it.

    A contender that the other report measured is left out of some cases only.
    """
    found = {}
    for part, other in ((report, later), (later, report)):
        known, labels = contenders(other), {row["label"] for row in part["rows"]}
        for name, reason in part["left_out"].items():
            lacking = [f", of {row['label']}" for row in rows if row["label"] in labels and name not in row["times_ms"]]
            found |= dict.fromkeys((name + case for case in (lacking if name in known else [""])), reason)
    measured = {
        name + case
        for row in later["rows"]
        for name in row["times_ms"]
        for case in (f", of {row['label']}", f", of {row['label']}, {row['measure']}")
    }
    return {name: reason for name, reason in found.items() if name not in measured}


def _by_case(rows: Iterable[Row]) -> dict[tuple[str, str], Row]:
    return {(row["label"], row["measure"]): row for row in rows}
