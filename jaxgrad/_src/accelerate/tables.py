"""The tables that `print` shows of a report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from jaxgrad._src.accelerate.calls import Call, Layer

_NOTE = "Not counted: batch normalization and other operations bound by memory, and repetitions of `while` loops."


def with_totals(found: Sequence[Layer], counts: Mapping[str, int], platform: str, summary: str) -> str:
    """The table of layers, the number of calls by implementation, and the summary of a report."""
    total, left = sum(counts.values()), counts.get("xla", 0)
    totals = f"{_number(total, 'call')} in {_number(len(found), 'layer')} on {platform}, {left} calls on XLA"
    return "\n".join([layers(found), totals, summary, _NOTE] if found else [totals, summary])


def layers(found: Iterable[Layer]) -> str:
    """A row for each op, implementation and reason of each layer."""
    rows: list[Sequence[str]] = []
    for layer in found:
        alike: dict[tuple[str, str, str], list[Call]] = {}
        for call in layer.calls:
            alike.setdefault((call.op, call.implementation, call.reason), []).append(call)
        name = f"{layer.source} {layer.scope}".rstrip()
        for (op, implementation, reason), calls in alike.items():
            rows.append((name, op, _passes(calls), implementation, _flops(calls), reason))
            name = ""
    return _table(("layer", "op", "passes", "runs on", "MFLOP", "why"), rows)


def details(calls: Iterable[Call]) -> str:
    """A row for each call."""
    header = ("source", "op", "shapes", "pass", "runs on", "count", "repeats", "MFLOP", "why")
    rows = [
        (
            *(c.source, c.op, c.shapes, c.pass_name or "-", c.implementation),
            *(str(c.count), str(c.repeats), in_millions(c.flops), c.reason),
        )
        for c in calls
    ]
    return _table(header, rows)


def in_millions(flops: int | None) -> str:
    """Returns a number of operations in millions, with 4 digits."""
    if flops is None:
        return "-"
    millions = flops / 1e6
    return f"{millions:.0f}" if millions >= 1e4 else f"{millions:.4g}"


def _passes(calls: Iterable[Call]) -> str:
    """The passes, and how many there are of each where there are several."""
    counts: Counter[str] = Counter()
    for call in calls:
        counts[call.pass_name or "-"] += call.count
    return ", ".join(name if count == 1 else f"{count} {name}" for name, count in counts.items())


def _number(count: int, noun: str) -> str:
    return f"{count} {noun}{'s' * (count != 1)}"


def _flops(calls: Iterable[Call]) -> str:
    totals = [call.total_flops for call in calls]
    return "-" if None in totals or not any(totals) else in_millions(sum(filter(None, totals)))


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in (header, *rows))
