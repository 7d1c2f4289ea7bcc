"""`python -m jaxgrad bench`: the options, and what is printed and written."""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import math
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax

from jaxgrad._src.bench import chart, shapes
from jaxgrad._src.bench.default_calls import default_calls
from jaxgrad._src.bench.measure import measure
from jaxgrad._src.bench.results import as_json
from jaxgrad._src.bench.table import lines, notes
from jaxgrad._src.core.files import replace_file

_PARSERS: dict[str, tuple[Callable[[str], Any], str]] = {
    "conv": (shapes.conv, shapes.CONV),
    "conv-transpose": (shapes.conv_transpose, shapes.CONV),
    "batch-norm": (shapes.batch_norm, shapes.BATCH_NORM),
    "group-norm": (shapes.group_norm, shapes.BATCH_NORM),
    "layer-norm": (shapes.layer_norm, shapes.ROWS),
    "rms-norm": (shapes.rms_norm, shapes.ROWS),
    "gru": (shapes.gru, shapes.GRU),
}
_OPTIONS = {
    "conv": "stride, padding (SAME, VALID, causal or sizes), dilation, groups, layout, dtype",
    "conv-transpose": "the same options, without causal padding",
    "batch-norm": "feature_axis, activation (relu, silu, gelu), dtype",
    "group-norm": "groups, feature_axis, activation, dtype",
    "layer-norm": "activation, dtype",
    "rms-norm": "activation, dtype",
    "gru": "direction (forward, bidirectional), linear_before_reset (true, false), dtype",
}
_DESCRIPTION = (
    "Measures jaxgrad's ops, with their gradients, against XLA and, where it is installed, PyTorch. Without shapes, "
    "about a dozen calls are measured. Options of a call follow its shape, as in "
    "--conv 8x56x56x64,3x3,128,stride=2,groups=32. Each may be given several times."
)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.description = _DESCRIPTION
    for name, (parse, example) in _PARSERS.items():
        text = f"{example}; {_OPTIONS[name]}"
        parser.add_argument(f"--{name}", dest="calls", action="append", type=parse, metavar="SHAPE", help=text)
    dtypes = ", ".join(shapes.DTYPES)
    parser.add_argument(
        "--dtype", type=shapes.dtype, help=f"of calls without one: {dtypes}; by default f32 on a CPU, bf16 on a GPU"
    )
    parser.add_argument(
        "--seconds", type=_seconds, default=120, metavar="N", help="start no other call after that time (default: 120)"
    )
    parser.add_argument("--json", type=_json_file, metavar="FILE", help="write every number to a file")
    parser.add_argument(
        "--chart", type=_chart_file, metavar="FILE", help="draw a chart, .png or .svg, in place of bars of text"
    )
    parser.add_argument("--no-torch", action="store_true", help="leave out PyTorch")


def run(args: argparse.Namespace) -> int:
    platform = jax.default_backend()
    dtype = args.dtype or ("bfloat16" if platform == "gpu" else "float32")
    calls = args.calls or [_PARSERS[name][0](text) for name, text in default_calls(platform)]
    calls = [dataclasses.replace(call, dtype=call.dtype or dtype) for call in calls]
    results = measure(calls, dtype, args.seconds, not args.no_torch)
    if not results.calls:
        print("\n".join(notes(results)))
        return 1
    print("\n".join(lines(results, bars=args.chart is None)))
    if args.json:
        date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        replace_file(args.json, json.dumps(as_json(results, date), indent=1) + "\n")
    if args.chart:
        chart.save(results, args.chart)
    return 0


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"must be a positive number, got {text!r}")
    return value


def _json_file(text: str) -> Path:
    path = Path(text)
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"must be in a folder that exists, got {text!r}")
    return path


def _chart_file(text: str) -> Path:
    path = _json_file(text)
    if path.suffix not in (".png", ".svg"):
        raise argparse.ArgumentTypeError(f"must end with .png or .svg, got {text!r}")
    if find_spec("matplotlib") is None:
        raise argparse.ArgumentTypeError("requires matplotlib, which is not installed: pip install matplotlib")
    return path
