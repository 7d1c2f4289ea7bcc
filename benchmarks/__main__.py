"""`python -m benchmarks gru` measures; `charts` and `tables` write docs/charts and the tables from the results.

Measuring needs the compiled modules: install the checkout with `pip install -e '.[dev]'`. Charts and tables do not need
JAX, and time nothing.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import re
import sys
import time
import traceback
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from benchmarks import report, tables
from benchmarks.memory import keep_freed_memory
from benchmarks.options import Effort, Options

_ROOT = Path(__file__).parents[1]
_RESULTS = _ROOT / "benchmarks" / "results"
_CHARTS = _ROOT / "docs" / "charts"
_OPS = {
    "steps": "whole training steps of convolutional networks",
    "models": "training steps of models in flax and equinox",
    "tuned": "training steps and single calls under jaxgrad.tune, also where the table of preferences is wrong",
    "scaling": "training steps on several devices and on one",
    "conv": "convolutions and transposed convolutions",
    "norm": "batch, group, layer and RMS norm",
    "gru": "the GRU",
    "recurrent": "training steps of recurrent networks",
    "per_example": "per-example gradients",
}


def main() -> None:
    arguments = sys.argv[1:]
    op = import_module(f"benchmarks.{arguments[0]}") if arguments and arguments[0] in _OPS else None
    args = _parser(op).parse_args(arguments)
    if args.command == "charts":
        _draw(args)
    elif args.command == "tables":
        _tabulate(args)
    elif args.command == "preferences":
        _prefer(args)
    elif args.command == "once":
        from benchmarks import once

        once.run(args.op, args.match)
    else:
        assert op is not None
        _measure(op, args)


def _parser(op: ModuleType | None) -> argparse.ArgumentParser:
    """`op` is the module of the command, where it measures: only that one is imported."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Times jaxgrad's ops and their peers.")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, what in _OPS.items():
        command = commands.add_parser(name, help=f"measure {what}", description=op.__doc__ if op else None)
        if op is not None:
            _add_options(command, op)
    command = commands.add_parser("once", help="make each call of some cases once, for a profiler of kernels")
    command.add_argument("op", choices=("conv", "gru"))
    command.add_argument("match", type=_regex, metavar="REGEX", help="of the labels of the cases")
    command = commands.add_parser("charts", help="draw docs/charts from the results")
    command.add_argument("--results", type=Path, default=_RESULTS)
    command.add_argument("--output", type=Path, default=_CHARTS)
    command = commands.add_parser("tables", help="rewrite the tables in README.md and docs/ from the results")
    command.add_argument("--results", type=Path, default=_RESULTS)
    pages = [_ROOT / "README.md", *(_ROOT / "docs").rglob("*.md")]
    command.add_argument("--files", nargs="+", type=Path, default=pages)
    command = commands.add_parser("preferences", help="write the tables by which jaxgrad selects implementations")
    command.add_argument("--measure", action="store_true", help="measure all implementations on this device first")
    command.add_argument("--again", metavar="REGEX", help="of calls to measure first, also where an older jaxgrad did")
    command.add_argument("--seconds", type=_positive, metavar="N", help="measure no other call after N seconds")
    command.add_argument("--check", action="store_true", help="write nothing; fail if a table is not up to date")
    return parser


def _add_options(command: argparse.ArgumentParser, op: ModuleType) -> None:
    command.add_argument("--cases", nargs="+", type=op.parse_case, metavar="CASE", help=op.parse_case.__doc__)
    names = ", ".join(repr(name) for name in op.CONTENDERS)
    command.add_argument(
        "--contenders",
        nargs="+",
        choices=op.CONTENDERS,
        metavar="NAME",
        help=f"measure jaxgrad and these alone, of {names}",
    )
    command.add_argument("--repeats", type=_positive, help="rounds over all contenders, of every row")
    command.add_argument("--quick", action="store_true", help="tiny cases, to see that everything runs")
    command.add_argument("--output", type=Path, help="folder of the JSON: benchmarks/results, and none with --quick")
    command.add_argument("--add", action="store_true", help="keep the other rows and contenders of the JSON")
    command.add_argument("--rest", action="store_true", help="--add, and measure only the cases that the JSON lacks")
    command.add_argument("--match", nargs="+", type=_regex, metavar="REGEX", help="only cases that match one of them")
    command.add_argument("--part", type=_part, default=(1, 1), metavar="K/N", help="--add, and only every N-th case")
    command.add_argument("--seconds", type=_positive, metavar="N", help="start no other case after N seconds")
    command.add_argument(
        "--compile-seconds", type=_positive, default=180, help="time limit of torch.compile for one contender"
    )


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {text}")
    return int(text)


def _regex(text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"must be a regular expression, got {text}: {error}") from None


def _part(text: str) -> tuple[int, int]:
    part, _, parts = text.partition("/")
    if not (part.isdecimal() and parts.isdecimal() and 1 <= int(part) <= int(parts)):
        raise argparse.ArgumentTypeError(f"must be K/N with K from 1 to N, got {text}")
    return int(part), int(parts)


def _measure(op: ModuleType, args: argparse.Namespace) -> None:
    import jax

    platform = jax.default_backend()
    if platform not in op.CASES and not (args.quick or args.cases):
        raise SystemExit(f"{args.command} has cases for the platform {' and '.join(op.CASES)}, JAX runs on {platform}")
    # Results of single calls are large. Quick cases run in tests too, whose process stays as it is.
    if args.command == "conv" and platform == "cpu" and not args.quick:
        keep_freed_memory()
    effort = Effort(args.repeats, 0) if args.repeats else Effort(3, 0) if args.quick else Effort(12, 1)
    options = Options(effort, args.contenders and frozenset(args.contenders), args.compile_seconds)
    folder = args.output or (None if args.quick else _RESULTS)
    results, failed = None, []
    name = report.file_name(args.command, jax.devices()[0].device_kind if platform == "gpu" else None)
    adds = args.add or args.rest or args.part != (1, 1)
    if adds and folder is not None and (path := folder / f"{name}.json").exists():
        results = report.load(path)
    known = {case.label: case for case in op.CASES.get(platform, ())}
    cases = args.cases or (op.QUICK_CASES if args.quick else op.CASES[platform])
    cases = _selected(cases, args)
    start, left = time.monotonic(), [case for case in cases if not (args.rest and _is_measured(case, results))]
    for number, case in enumerate(left):
        if args.seconds and time.monotonic() - start > args.seconds:
            print(f"not measured in {args.seconds} s: {', '.join(each.label for each in left[number:])}")
            break
        try:
            measured = op.measure([known.get(case.label, case)], options)
        except Exception:  # the other cases are still measured
            traceback.print_exc()
            failed.append(case.label)
            continue
        if adds and folder is not None:  # a run may be stopped before its last case
            results = report.add(measured, folder)
        else:
            results = measured if results is None else report.joined(results, measured)
            if folder is not None:
                report.save(results, folder)
    if results is not None:
        print("", tables.text(results), sep="\n")
        if folder is not None:
            print(f"\n{folder / report.name(results)}.json")
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


def _selected(cases: Sequence[Any], args: argparse.Namespace) -> list[Any]:
    """The cases of --match, those of its first expression first, and of --part.

    A part is the same whatever is measured already.
    """
    if args.match:
        cases = [case for regex in args.match for case in cases if regex.search(case.label)]
        if not cases:
            raise SystemExit(f"no case matches {' or '.join(regex.pattern for regex in args.match)}")
    part, parts = args.part
    return list(dict.fromkeys(cases))[part - 1 :: parts]


def _is_measured(case: Any, results: report.Report | None) -> bool:
    settings = dataclasses.asdict(case).items()
    return results is not None and any(
        all(row["settings"].get(name) == value for name, value in json.loads(json.dumps(dict(settings))).items())
        for row in results["rows"]
    )


def _draw(args: argparse.Namespace) -> None:
    from benchmarks import charts

    written, missing = charts.write(args.results, args.output)
    print(*written, sep="\n")
    if missing:
        print(f"no results for {', '.join(missing)}")


def _tabulate(args: argparse.Namespace) -> None:
    written, missing = tables.update(args.files, args.results)
    print(f"rewrote {', '.join(written) or 'nothing'}")
    if missing:
        print(f"no results for {', '.join(missing)}")


def _prefer(args: argparse.Namespace) -> None:
    import jax

    from benchmarks import preferences

    if args.measure:
        limit = args.seconds or math.inf
        print(preferences.measure(jax.default_backend(), again=args.again, seconds=limit))
        if not preferences.TABLES.is_dir():  # in a copy of benchmarks/, beside an installed jaxgrad
            return
    elif args.again or args.seconds:
        raise SystemExit("--again and --seconds are for --measure")
    changed = ", ".join(preferences.write(preferences.TABLES, check=args.check)) or "nothing"
    if args.check and changed != "nothing":
        raise SystemExit(f"not up to date: {changed}")
    print(f"rewrote {changed}")
    for device, found in preferences.replays().items():
        slow = sum(regret > 1.2 for regret in found.values())
        mean = math.exp(sum(map(math.log, found.values())) / len(found))
        print(
            f"{device}: {len(found)} measured calls take {mean:.3f} times as long as on their fastest implementations "
            f"in the geometric mean, {max(found.values()):.2f} times at most; {slow} more than 1.2 times"
        )


if __name__ == "__main__":
    main()
