"""Draws one chart: horizontal bars of speed-ups on a log axis, in panels that share their rows."""

from __future__ import annotations

import dataclasses
import io
import math
import textwrap
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter, NullLocator
from PIL import Image

from benchmarks.wording import ratio

# Blue and vermilion of Okabe and Ito: distinct for all kinds of color vision, and in gray.
_FASTER, _SLOWER = "#0072B2", "#D55E00"
_TEXT, _GRAY, _FAINT = "#1a1a1a", "#5c5c5c", "#d9d9d9"
_WIDTH, _ROW, _DPI = 8.0, 0.235, 200  # inches, inches, pixels of an inch
_TITLE_LETTERS = 72  # that fit at the largest size
_LEAST_END = 3.0  # the axis reaches at least this speed-up
_LABEL, _TICK = 0.5, 0.34  # inches: room for a label, and at least between ticks
_COLORS = 256  # of the PNG's palette
# The sets of ticks, the first that fits is taken.
_TICKS = (
    (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000),
    (0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000),
    (0.01, 0.1, 1, 10, 100, 1000),
)
_PARITY = 0.005  # a speed-up this close to 1 is drawn and labeled as 1


@dataclasses.dataclass(frozen=True)
class Bar:
    """A speed-up, or the geometric mean of several between `low` and `high`."""

    value: float
    low: float
    high: float

    @property
    def drawn(self) -> float:
        return 1.0 if abs(self.value - 1) < _PARITY else self.value

    @property
    def label(self) -> str:
        return ratio(self.drawn)


@dataclasses.dataclass(frozen=True)
class Panel:
    """One bar for each row of the chart; None where nothing was measured."""

    title: str
    bars: Sequence[Bar | None]


@dataclasses.dataclass(frozen=True)
class Chart:
    title: str
    subtitle: Sequence[str]
    rows: Sequence[str]
    panels: Sequence[Panel]


def save(chart: Chart, path: Path) -> None:
    """Writes a PNG with a white background, twice as wide as the 800 pixels that it is read at."""
    path.parent.mkdir(parents=True, exist_ok=True)
    drawn = io.BytesIO()
    draw(chart).savefig(drawn, format="png", dpi=_DPI, facecolor="white")
    with Image.open(drawn) as image:
        few = image.convert("RGB").quantize(_COLORS, dither=Image.Dither.NONE)
        few.save(path, optimize=True)


def draw(chart: Chart) -> Figure:
    subtitle = [line for text in chart.subtitle for line in textwrap.wrap(text, 118)]
    top = 0.42 + 0.17 * len(subtitle) + 0.36  # inches above the panels: title, subtitle, titles of the panels
    bottom = 0.5
    height = top + bottom + _ROW * len(chart.rows)
    figure = Figure(figsize=(_WIDTH, height))
    size = min(12, 12 * _TITLE_LETTERS / len(chart.title))
    left = 0.2 + 0.072 * max(map(len, chart.rows))
    figure.text(0.12 / _WIDTH, 1 - 0.1 / height, chart.title, size=size, weight="bold", color=_TEXT, va="top")
    for i, line in enumerate(subtitle):
        at = 1 - (0.4 + 0.17 * i) / height
        figure.text(0.12 / _WIDTH, at, line, size=9, color=_GRAY, va="top")
    count = len(chart.panels)
    gap = 0.18
    width = (_WIDTH - left - 0.12 - gap * (count - 1)) / count
    limits = _limits(chart, width)
    for i, panel in enumerate(chart.panels):
        at = left + i * (width + gap)
        axes = figure.add_axes((at / _WIDTH, bottom / height, width / _WIDTH, _ROW * len(chart.rows) / height))
        _draw_panel(axes, panel, limits, width, _has_ranges(chart))
        axes.set_yticks(range(len(chart.rows)), chart.rows if i == 0 else [""] * len(chart.rows), size=9.5, color=_TEXT)
    legend = "Log scale. Blue, right of 1: jaxgrad is faster. Orange, left of 1: jaxgrad is slower."
    figure.text(0.12 / _WIDTH, 0.07 / height, legend, size=9, color=_GRAY, va="bottom")
    return figure


def _limits(chart: Chart, width: float) -> tuple[float, float]:
    """The ends of the axis, which all panels share, with room for labels."""
    bars = [bar for panel in chart.panels for bar in panel.bars if bar]
    low = min([0.0, *(math.log(value) for bar in bars for value in (bar.low, bar.drawn))])
    high = max([math.log(_LEAST_END), *(math.log(value) for bar in bars for value in (bar.high, bar.drawn))])
    left = _LABEL if any(bar.drawn < 1 for bar in bars) and not _has_ranges(chart) else 0.03
    inch = (high - low) / (width - left - _LABEL)
    return math.exp(low - left * inch), math.exp(high + _LABEL * inch)


def _has_ranges(chart: Chart) -> bool:
    return any(bar.low < bar.high for panel in chart.panels for bar in panel.bars if bar)


def _draw_panel(axes: Axes, panel: Panel, limits: tuple[float, float], width: float, ranges: bool) -> None:
    """With ranges, the labels stand in a column at the right edge, else beside the bars."""
    axes.set_xscale("log")
    axes.set_xlim(limits)
    for i, bar in enumerate(panel.bars):
        if bar is None:
            _label(axes, i, 1, 3, "not measured", _GRAY)
            continue
        slower = bar.drawn < 1
        color = _SLOWER if slower else _FASTER
        axes.barh(i, bar.drawn - 1, left=1, height=0.68, color=color, zorder=2)
        if bar.low < bar.high:
            axes.plot((bar.low, bar.high), (i, i), color=_TEXT, linewidth=1, solid_capstyle="butt", zorder=3)
        if ranges:
            _label(axes, i, limits[1], -1, bar.label, _SLOWER if slower else _TEXT)
        elif slower:
            _label(axes, i, bar.drawn, -3, bar.label, _SLOWER)
        else:
            _label(axes, i, bar.drawn, 3, bar.label, _TEXT)
    axes.axvline(1, color=_TEXT, linewidth=1.1, zorder=3)
    axes.set_ylim(len(panel.bars) - 0.5, -0.5)
    axes.set_xticks(_ticks(limits, width))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda tick, _: f"{tick:g}"))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.tick_params(axis="both", length=0, labelsize=9, labelcolor=_TEXT)
    axes.grid(axis="x", color=_FAINT, linewidth=0.6, zorder=0)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left", "bottom"):
        axes.spines[side].set_visible(False)
    axes.set_title(panel.title, size=10, weight="bold", color=_TEXT, loc="left", pad=5)


def _label(axes: Axes, row: int, at: float, points: float, text: str, color: str) -> None:
    """Text to the right of a place, or with negative points to the left."""
    side = "right" if points < 0 else "left"
    offset = {"xytext": (points, 0), "textcoords": "offset points"}
    axes.annotate(text, (at, row), **offset, ha=side, va="center_baseline", size=9, color=color, zorder=4)


def _ticks(limits: tuple[float, float], width: float) -> list[float]:
    """None where labels may stand to the right of all bars."""
    inches = width / math.log(limits[1] / limits[0])  # for a factor of e
    last = limits[1] * math.exp(-_LABEL / inches)
    for ticks in _TICKS:
        found = [tick for tick in ticks if limits[0] <= tick <= last]
        if all(inches * math.log(b / a) >= _TICK for a, b in pairwise(found)):
            break
    return found
