"""The speed-ups as a chart. Importing this module imports matplotlib, which jaxgrad does not require."""

from __future__ import annotations

import importlib
import io
import math
from pathlib import Path
from typing import Any

from jaxgrad._src.bench.results import Results
from jaxgrad._src.bench.table import environment, ratio
from jaxgrad._src.core.files import replace_file

_COLORS = ("#0072B2", "#E69F00")  # blue and orange of Okabe and Ito
_ROW, _LETTER = 0.2, 0.075  # inches: the height of a bar, the width of a letter
_LABEL = 0.14  # of the axis: room for a label on each side


def save(results: Results, path: Path) -> None:
    """Writes a PNG or SVG file: for each call a bar over each peer, on a log axis, from 1x on."""
    matplotlib: Any = importlib.import_module("matplotlib")
    figures: Any = importlib.import_module("matplotlib.figure")
    ticker: Any = importlib.import_module("matplotlib.ticker")
    texts, peers = [call.text for call in results.calls], results.peers
    step = _ROW * (len(peers) + 0.6)
    height, left = 1.15 + step * len(texts), 0.3 + _LETTER * max(map(len, texts))
    width = left + 4.5
    figure = figures.Figure(figsize=(width, height))
    axes = figure.add_axes((left / width, 0.4 / height, 4.3 / width, step * len(texts) / height))
    for index, (peer, color) in enumerate(zip(peers, _COLORS, strict=False)):
        for row, call in enumerate(results.calls):
            if (speedup := call.speedup(peer)) is None:
                continue
            at = row + (index - (len(peers) - 1) / 2) * _ROW / step
            axes.barh(at, speedup - 1, left=1, height=_ROW / step * 0.9, color=color, label=f"over {peer}")
            axes.annotate(
                ratio(speedup),
                (speedup, at),
                xytext=(3 if speedup >= 1 else -3, 0),
                textcoords="offset points",
                ha="left" if speedup >= 1 else "right",
                va="center_baseline",
                size=8,
            )
    axes.set_xscale("log")
    logs = [0.0, math.log(1.5), *(math.log(s) for peer in peers for s in results.speedups(peer))]
    margin = _LABEL * (max(logs) - min(logs))
    axes.set_xlim(math.exp(min(logs) - margin), math.exp(max(logs) + margin))
    axes.xaxis.set_major_formatter(ticker.FuncFormatter(lambda tick, _: f"{tick:g}"))
    axes.minorticks_off()
    axes.axvline(1, color="black", linewidth=1)
    axes.set_ylim(len(texts) - 0.5, -0.5)
    axes.set_yticks(range(len(texts)), texts, size=9)
    axes.tick_params(axis="both", length=0)
    axes.set_axisbelow(True)
    axes.grid(axis="x", color="#d9d9d9", linewidth=0.6)
    for side in ("top", "right", "left", "bottom"):
        axes.spines[side].set_visible(False)
    handles = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    place = {"loc": "upper right", "bbox_to_anchor": (1 - 0.05 / width, 1 - 0.02 / height), "ncols": len(peers)}
    figure.legend(handles.values(), handles.keys(), frameon=False, fontsize=9, **place)
    figure.text(
        0.1 / width, 1 - 0.1 / height, "Speed-up of jaxgrad, value and gradients", size=11, weight="bold", va="top"
    )
    figure.text(0.1 / width, 1 - 0.38 / height, environment(results), size=8, color="#5c5c5c", va="top")
    drawn = io.BytesIO()
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        figure.savefig(drawn, format=path.suffix[1:], dpi=160, facecolor="white")
    replace_file(path, drawn.getvalue())
