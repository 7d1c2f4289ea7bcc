"""The loop over the cases of a benchmark, which makes its report."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from benchmarks import environment
from benchmarks.report import Report, Row


def measured(
    op: str,
    cases: Sequence[Any],
    rows_of: Callable[[Any], list[Row]],
    explanations: Iterable[Any],
    notes: Sequence[str],
    left_out: dict[str, str] | None = None,
    **fields: Any,
) -> Report:
    """The report of `rows_of` of each case.

    Args:
      op: the name of the report.
      cases: the cases, which have labels.
      rows_of: measures a case. It may add to `left_out`.
      explanations: those of `jaxgrad.explain`.
      notes: how to read the rows.
      left_out: the missing contenders, each with the reason.
      **fields: other fields of the report.
    """
    left_out, rows = {} if left_out is None else left_out, []
    for case in cases:
        print(case.label, flush=True)
        rows += rows_of(case)
        gc.collect()  # frees the case's device memory before the next case
    return {
        "op": op,
        "environment": environment.describe(),
        "implementation": "; ".join(map(str, explanations)),
        "left_out": left_out,
        "notes": notes,
        **fields,
        "rows": rows,
    }
