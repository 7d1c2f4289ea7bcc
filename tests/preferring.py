"""Tables of preferences with another choice, for tests of what follows from a choice."""

from __future__ import annotations

import dataclasses
from unittest import mock

from jaxgrad._src.selection import table


def preferring(op: str, name: str, implementation: str):
    """A context in which the rows of this name prefer the implementation. Raises LookupError if there is none."""
    rows = table.rows
    if not any(
        (row.op, row.name) == (op, name) for of in ("generic cpu", "generic gpu") for row in table.read_table(of)
    ):
        raise LookupError(f"no table has a row {name!r} of {op}")

    def changed(platform: str) -> tuple[table.Row, ...]:
        return tuple(
            dataclasses.replace(row, prefer=implementation) if (row.op, row.name) == (op, name) else row
            for row in rows(platform)
        )

    return mock.patch.object(table, "rows", changed)
