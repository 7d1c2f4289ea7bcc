"""The results as text: environment, table, bars, and where XLA is the better choice."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from jaxgrad._src.bench.results import JAXGRAD, XLA, CallResult, PassResult, Results

_BAR_WIDTH = 40
# Limits of PassResult.difference. float32: another order of summation, and TF32 on a GPU; others: few bits of mantissa.
_LIMITS = {"float32": 1e-2}
_OTHER_LIMIT = 1e-1


def lines(results: Results, bars: bool) -> Iterator[str]:
    """All of the text; `bars` is whether there are bars."""
    yield environment(results)
    yield f"times of value and gradients, in {results.dtype} where a call has no dtype of its own"
    yield ""
    yield from _table(results)
    yield ""
    if bars:
        yield from _bars(results)
        yield ""
    yield from _means(results)
    yield from _advice(results)
    yield from notes(results)


def environment(results: Results) -> str:
    return f"{results.environment}" + (f", PyTorch {results.pytorch}" if results.pytorch else "")


def ratio(value: float) -> str:
    """Such as 0.95x, 1.25x, 3.1x, 25x."""
    return f"{value:.2f}x" if value < 2 else f"{value:.1f}x" if value < 10 else f"{value:.0f}x"


def _table(results: Results) -> Iterator[str]:
    header = ["call", "jaxgrad (ms)", *(f"{peer} (ms)" for peer in results.peers), "XLA / jaxgrad, by pass", "runs on"]
    rows = [header, *(_row(call, results.peers) for call in results.calls)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(map(str.ljust, row, widths)).rstrip()


def _row(call: CallResult, peers: Sequence[str]) -> list[str]:
    ours = call.milliseconds(JAXGRAD)
    cells = ["failed" if ours is None else _digits(ours)]
    for peer in peers:
        ms, speedup = call.milliseconds(peer), call.speedup(peer)
        cells.append("failed" if ms is None else _digits(ms) + (f" ({ratio(speedup)})" if speedup else ""))
    by_pass = ", ".join(f"{name} {ratio(s)}" for name, each in call.passes.items() if (s := each.speedup(XLA)))
    return [call.text, *cells, by_pass, _runs_on(call)]


def _runs_on(call: CallResult) -> str:
    found = {name: each.implementation for name, each in call.passes.items()}
    if len(set(found.values())) == 1:
        return next(iter(found.values()))
    return ", ".join(f"{name} {implementation}" for name, implementation in found.items())


def _digits(ms: float) -> str:
    """Three of them."""
    return f"{ms:.{max(0, 2 - math.floor(math.log10(ms)))}f}"


def _bars(results: Results) -> Iterator[str]:
    """Speed-ups over XLA, on a log scale with a bar at 1x."""
    found = {call.text: speedup for call in results.calls if (speedup := call.speedup(XLA)) is not None}
    if not found:
        return
    yield "speed-up over XLA, on a log scale"
    logs = [0.0, *map(math.log, found.values())]
    column = _BAR_WIDTH / max(max(logs) - min(logs), math.log(2))
    left, label = round(-min(logs) * column), max(map(len, found))
    for text, speedup in found.items():
        size = round(abs(math.log(speedup)) * column)
        below, above = (0, size) if speedup >= 1 else (size, 0)
        bar = " " * (left - below) + "#" * below + "|" + "#" * above
        yield f"{text:<{label}}  {bar} {ratio(speedup)}"


def _means(results: Results) -> Iterator[str]:
    means = {peer: results.geometric_mean(peer) for peer in results.peers}
    found = [
        f"{ratio(mean)} over {peer} ({_calls(len(results.speedups(peer)))})"
        for peer, mean in means.items()
        if mean is not None
    ]
    if found:
        yield f"Geometric mean of the speed-ups: {', '.join(found)}."


def _advice(results: Results) -> Iterator[str]:
    passes = [(call.text, name, each) for call in results.calls for name, each in call.passes.items()]
    unsteady = sum(not each.is_steady for *_, each in passes)
    if unsteady:
        yield f"Warning: the times of {unsteady} of {len(passes)} passes vary by more than 25 %: too much for advice."
        yield "Measure on an idle machine: other work slows down kernels that wait for all threads the most."
    if better := [each for each in passes if each[2].is_faster_on_xla]:
        yield "XLA is the better choice for:"
        yield from (f"  {text}, {name}: {_versus(each)}" for text, name, each in better)
        yield "jaxgrad.tune finds such passes in a program and runs them on XLA."
        yield 'implementation="xla" runs all passes of one call on XLA.'
    elif unsteady < len(passes):
        yield f"XLA is not more than 5 % faster than jaxgrad's kernels in any {'other ' * bool(unsteady)}pass."
    if alike := [each for each in passes if each[2].is_slower_than_xla and not each[2].is_faster_on_xla]:
        yield "jaxgrad left these passes to XLA, which took longer than in a program without jaxgrad:"
        yield from (f"  {text}, {name}: {_versus(each)}" for text, name, each in alike)


def _versus(result: PassResult) -> str:
    ours, xla = result.median(JAXGRAD), result.median(XLA)
    assert ours is not None
    assert xla is not None
    where = "in jaxgrad" if result.implementation == "xla" else f"on {result.implementation}"
    return f"{_digits(xla)} ms on XLA, {_digits(ours)} ms {where}"


def notes(results: Results) -> Iterator[str]:
    for what, reason in results.left_out.items():
        yield f"{what} was not measured: {reason}."
    for call in results.calls:
        limit = _LIMITS.get(call.dtype, _OTHER_LIMIT)
        for name, each in call.passes.items():
            if each.difference is not None and not each.difference <= limit:
                yield (
                    f"Warning: the results of jaxgrad and XLA differ by {each.difference:.0e} of their norm: "
                    f"{call.text}, {name}."
                )
            for contender, reason in each.failed.items():
                yield f"{contender} failed: {call.text}, {name}: {reason}."


def _calls(count: int) -> str:
    return "1 call" if count == 1 else f"{count} calls"
