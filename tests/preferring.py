"""Tables of preferences with another choice, for tests of what follows from a choice."""

from __future__ import annotations

import dataclasses
from unittest import mock

from jaxgrad._src.choice import table


def preferring(op: str, name: str, implementation: str):
    """A context in which the rows of this name prefer the implementation. Raises LookupError if there is none."""
    rows = table.rows
    if not any((row.op, row.name) == (op, name) for of in ("cpu", "gpu") for row in table.read_table(of)):
        raise LookupError(f"no table has a row {name!r} of {op}")

    def changed(platform: str) -> tuple[table.Row, ...]:
        return tuple(
            dataclasses.replace(row, prefer=implementation) if (row.op, row.name) == (op, name) else row
            for row in rows(platform)
        )

    return mock.patch.object(table, "rows", changed)


def with_instruction_set(name: str):
    """A context in which the table is that of CPUs with this instruction set."""
    return mock.patch.object(table, "_instruction_set", return_value=name)


_OTHER = {"xla": "onednn", "onednn": "xla", "cpu": "onednn", "taps": "convolution"}


def with_other_preferences():
    """A context in which each row for convolutions on a CPU prefers another implementation, or form on XLA."""
    rows = table.rows

    def changed(platform: str) -> tuple[table.Row, ...]:
        of_cpu = platform == "cpu"
        return tuple(
            dataclasses.replace(row, prefer=_OTHER.get(row.prefer, row.prefer)) if of_cpu and row.op != "gru" else row
            for row in rows(platform)
        )

    return mock.patch.object(table, "rows", changed)
