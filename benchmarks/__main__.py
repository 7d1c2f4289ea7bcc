"""`python -m benchmarks gru` measures; `python -m benchmarks readme` brings the results into README.md."""

from __future__ import annotations

import argparse
import json
import traceback
from pathlib import Path

import jax

from benchmarks import batch_norm, conv, gru, per_example, readme, report, scaling, steps
from benchmarks.timing import Effort

_OPS = {
    "gru": gru,
    "conv": conv,
    "batch_norm": batch_norm,
    "steps": steps,
    "per_example": per_example,
    "scaling": scaling,
}
_RESULTS = Path(__file__).parent / "results"
_README = Path(__file__).parents[1] / "README.md"


def _positive(text: str) -> int:
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {text}")
    return int(text)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description="Times jaxgrad's ops against their peers."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name, op in _OPS.items():
        command = commands.add_parser(name, help=f"measure the {name}", description=op.__doc__)
        command.add_argument("--cases", nargs="+", type=op.parse_case, metavar="CASE", help=op.parse_case.__doc__)
        command.add_argument("--repeats", type=_positive, help="rounds over all contenders, of every row")
        command.add_argument("--quick", action="store_true", help="tiny cases, to see that all of it runs")
        command.add_argument(
            "--output", type=Path, help=f"folder of the JSON and the plot: {_RESULTS.name}/, and none with --quick"
        )
        command.add_argument("--add", action="store_true", help="keep the other cases of the JSON that is there")
    command = commands.add_parser("readme", help="rewrite the tables in README.md", description=readme.__doc__)
    command.add_argument("--readme", type=Path, default=_README)
    command.add_argument("--results", type=Path, default=_RESULTS)
    return parser


def _measure(args: argparse.Namespace) -> None:
    op, platform = _OPS[args.command], jax.default_backend()
    if platform not in op.CASES and not args.quick:
        raise SystemExit(f"{args.command} has cases for the platform {' and '.join(op.CASES)}, JAX runs on {platform}")
    effort = Effort(args.repeats, 0) if args.repeats else Effort(3, 0) if args.quick else Effort(12, 1)
    folder = args.output or (None if args.quick else _RESULTS)
    results, failed = None, []
    if args.add and folder is not None and (found := folder / f"{args.command}-{platform}.json").exists():
        results = json.loads(found.read_text())
    for case in args.cases or (op.QUICK_CASES if args.quick else op.CASES[platform]):
        try:
            measured = op.measure([case], effort)
        except Exception:  # one case must not cost the others their results
            traceback.print_exc()
            failed.append(case.label)
            continue
        results = measured if results is None else report.joined(results, measured)
        if folder is not None:  # a run may be stopped before its last case
            report.save(results, folder)
    if results is not None:
        report.print_table(results)
        if folder is not None:
            report.save_plot(results, folder, op.BASELINE)
            print(f"\n{folder / report.name(results)}.json and .png")
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


def main() -> None:
    args = _parser().parse_args()
    if args.command == "readme":
        try:
            names, without = readme.update(args.readme, args.results)
        except (OSError, ValueError) as error:  # no file, or no marked section
            raise SystemExit(str(error)) from None
        print("rewrote " + ", ".join(names))
        if without:
            print("no results for " + ", ".join(without))
    else:
        _measure(args)


if __name__ == "__main__":
    main()
