"""Tables of preferences: which implementation is the fastest for a class of calls, one table for each platform.

`python -m benchmarks preferences` writes `tables/cpu.json` and `tables/gpu.json` from measurements. A call takes the
first row that matches it and whose implementation supports it. A row prefers a kernel of jaxgrad only where it is
clearly faster on all devices on which calls of the class were measured. Where a device has another preference, the row
has it with its measurement under "on", by the kind of a GPU or the instruction set of a CPU.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection, Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import jax

from jaxgrad._src.choice.op import public_platform
from jaxgrad._src.native import cpu, cuda

_TABLES = Path(__file__).parent / "tables"


@dataclasses.dataclass(frozen=True)
class Row:
    """A row of a table.

    Attributes:
      name: of the class of calls.
      op: "conv", "batch_norm" or "gru"; "conv_on_xla" for the forms in which XLA runs a convolution
        (conv/on_xla/forms.py), which the row calls implementations.
      passes: the passes that the row is for.
      when: by feature of the call, a value, or the least and the largest value as "at_least" and "at_most". The row
        matches a call with all of them. A row with the feature "problems" applies to calls whose sizes `vmap` or a mesh
        has changed after they were selected; a row whose "problems" may be 0 applies to other calls too.
      prefer: the implementation that runs. A kernel must be clearly faster than XLA or another library.
      why: why, in one sentence.
      measured: the measurement behind it, or None: the implementation that it was compared with ("over"), the geometric
        mean and the least of the times of that one over those of the preferred one ("ratio", "least"), the number of
        measured calls ("cases"), the one in the middle ("case"), and the day of the last measurement and its version of
        jaxgrad ("date", "jaxgrad"). The other versions are in the table's file. "few_cases" is set for one or two.
      table: the name of the table.
      device: the device whose own preference this is; empty for the common one.
    """

    name: str
    op: str
    passes: tuple[str, ...]
    when: Mapping[str, Any]
    prefer: str
    why: str
    measured: Mapping[str, Any] | None
    table: str
    device: str = ""

    def matches(self, features: Any) -> bool:
        """Whether the call with these features belongs to the class. Features are asked for in the order of `when`."""
        return all(_holds(condition, getattr(features, name)) for name, condition in self.when.items())

    def __str__(self) -> str:
        text = f"row {self.name!r} of the table {self.table!r}" + (self.device and f" for {self.device!r}")
        if (m := self.measured) is None:
            return f"{text}, without a measurement"
        few, cases = "only " if m.get("few_cases") else "", "case" if m["cases"] == 1 else "cases"
        where = f"in {few}{m['cases']} {cases}, the last on {m['date']} with jaxgrad {m['jaxgrad']}"
        if m["ratio"] < 1:
            return f"{text}: {m['over']} was measured {1 / m['ratio']:.2f}x as fast {where}: too little"
        return f"{text}, measured {m['ratio']:.2f}x as fast as {m['over']} {where}"


def _holds(condition: Any, value: Any) -> bool:
    if isinstance(condition, Mapping):
        return bool(condition.get("at_least", value) <= value <= condition.get("at_most", value))
    return bool(value == condition)


def preference(
    op: str, pass_name: str, platform: str, features: Any, among: Collection[str], *, resized: bool = False
) -> Row | None:
    """Returns the row of this machine's table for a call.

    Args:
      op: as in `Row`.
      pass_name: the pass.
      platform: the platform that the program is lowered for.
      features: the features of the call, as attributes.
      among: the implementations to choose from.
      resized: whether `vmap` or a mesh has changed the sizes of a call that was selected before. Only rows with the
        feature "problems" apply then, and there may be none.
    """
    row = first_row(rows(platform), op, pass_name, features, among, resized=resized)
    if row is None and not resized:
        raise AssertionError(f"the table {public_platform(platform)} has no row for every {op} {pass_name}")
    return row


def first_row(
    table: Iterable[Row], op: str, pass_name: str, features: Any, among: Collection[str], *, resized: bool = False
) -> Row | None:
    """`preference` in a given table."""
    for row in table:
        applies = "problems" in row.when if resized else _holds(row.when.get("problems", 0), 0)
        asked = row.op == op and pass_name in row.passes and row.prefer in among
        if asked and applies and row.matches(features):
            return row
    return None


def rows(platform: str) -> tuple[Row, ...]:
    """The rows as this machine's device takes them."""
    return read_table(public_platform(platform), this_device(platform))


def this_device(platform: str) -> str:
    """The device of this machine as rows name it; empty if programs take the common preferences.

    Programs for a GPU that are lowered without one take these. So do programs for CPUs of several processes, which must
    all select alike, and may run on unlike machines.
    """
    if platform == "cuda":
        return cuda.device_kind() or ""
    return _instruction_set() if jax.process_count() == 1 else ""


@cache
def _instruction_set() -> str:
    return cpu.build_info().get("instruction_set", "")


@cache
def read_table(name: str, device: str = "") -> tuple[Row, ...]:
    """Reads a table by its name, with the preferences of a device."""
    content = json.loads((_TABLES / f"{name}.json").read_text(encoding="utf-8"))
    return typed_rows(content["rows"], name, device)


def typed_rows(rows: Iterable[Mapping[str, Any]], name: str, device: str = "") -> tuple[Row, ...]:
    """The rows of a table of that name, as its file has them, with the preferences of a device."""
    return tuple(_typed(row, name, device) for row in rows)


def _typed(row: Mapping[str, Any], table: str, device: str) -> Row:
    on = row.get("on", {}).get(device)
    fields = {**row, **on, "device": device} if on else dict(row)
    fields.pop("on", None)
    return Row(**{**fields, "passes": tuple(row["passes"]), "table": table})
