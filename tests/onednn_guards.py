"""Runs random convolutions on oneDNN, on arrays between pages without access, with several instruction sets.

    python tests/onednn_guards.py LIBRARY [--calls N] [--seed N] [--isa NAME ...]

LIBRARY is the target `onednn_guards` of ffi/CMakeLists.txt. `--calls` is the number for each instruction set. Prints
the number of calls and the kernels that ran. Exits with 1 if a kernel accesses other memory, or is wrong.

The kernels of oneDNN are compiled at run time. AddressSanitizer does not see their accesses; the pages do.
"""

from __future__ import annotations

import argparse
import collections
import ctypes
import json
import math
import os
import random
import signal
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

INSTRUCTION_SETS = "SSE41", "AVX", "AVX2", "AVX512_CORE", "DEFAULT"  # the last: all that the processor has
_PASSES = "forward", "input_gradient", "weight_gradient"
_MAX_PRODUCTS = 1 << 20
_SECONDS = 600  # that a process may take
_RIGHT, _NO_KERNEL = 0, 1


def random_problem(rng: random.Random) -> dict[str, Any]:
    """Sizes of a convolution of few features: often a strided window of one element, each axis of another size."""
    while True:
        n = rng.choice((1, 2, 2, 2, 3))
        longest = rng.choice((1, 1, 3, 3, 5, 9))
        window = tuple(rng.randint(1, longest) for _ in range(n))
        strides = tuple(rng.randint(1, 4) for _ in range(n)) if rng.random() < 0.7 else (1,) * n
        dilation = tuple(rng.randint(1, 3) for _ in range(n)) if rng.random() < 0.2 else (1,) * n
        groups = rng.choice((1, 1, 1, 2, 3, 8))
        many = rng.random() < 0.15
        features, out_features = (rng.choice((8, 15, 16, 17, 24, 32, 40)) if many else rng.randint(1, 9) for _ in "io")
        y = [rng.randint(1, (40, 24, 9)[n - 1]) for _ in range(n)]
        span = [(k - 1) * d + 1 for k, d in zip(window, dilation, strict=True)]
        wide = rng.choice((0, 0, 1, 1, 2))  # padding may be wider than the window
        padding = [(rng.randrange(wide * s + 1), rng.randrange(wide * s + 1)) for s in span]
        # x ends with the last window, with a whole stride, as kernels that copy without strides need it, or between.
        end = rng.choice(("window", "stride", "stride", "between"))
        rest = [
            {"window": 0, "stride": max(0, s - k), "between": rng.randrange(s)}[end]
            for s, k in zip(strides, span, strict=True)
        ]
        covered = [(size - 1) * s + k for size, s, k in zip(y, strides, span, strict=True)]
        x = [c + r - low - high for c, r, (low, high) in zip(covered, rest, padding, strict=True)]
        batch = rng.randint(1, 9)
        products = batch * math.prod(y) * math.prod(window) * features * out_features * groups
        if min(x) > 0 and products <= _MAX_PRODUCTS:
            break
    return {
        "pass_name": rng.choice((*_PASSES, "weight_gradient")),
        "dtype": rng.choice(("float32", "bfloat16")),
        "has_bias": rng.random() < 0.3,
        "whole_team": rng.random() < 0.3,
        "channels_last": rng.random() < 0.7,
        "batch": batch,
        "features": groups * features,
        "out_features": groups * out_features,
        "groups": groups,
        "x_spatial": tuple(x),
        "w_spatial": window,
        "strides": strides,
        "padding": tuple(padding),
        "dilation": dilation,
        "one_of_several": rng.random() < 0.2,
    }


def _layouts(n: int, channels_last: bool) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The layouts of activations and of weights, as in `jax.lax.ConvDimensionNumbers`."""
    if channels_last:
        return (0, n + 1, *range(1, n + 1)), (n + 1, n, *range(n))
    return tuple(range(n + 2)), tuple(range(n + 2))


class Caller:
    """Calls the library with problems that jaxgrad runs on oneDNN."""

    def __init__(self, library: str) -> None:
        from jaxgrad._src.native import cpu

        self._library = ctypes.CDLL(library)
        found = cpu.find_onednn().library
        assert found is not None, cpu.onednn_unavailable()
        self._onednn = found.path.encode()

    def arguments(self, problem: dict[str, Any]) -> list[int] | None:
        """The call for the library; None if jaxgrad does not run the problem on oneDNN."""
        from jax import numpy as jnp

        from jaxgrad._src.choice import settings
        from jaxgrad._src.conv.call.geometry import ConvGeometry
        from jaxgrad._src.conv.call.params import ConvCall
        from jaxgrad._src.conv.call.problem import ConvProblem
        from jaxgrad._src.conv.kernels.onednn import OneDnnBackend, computed_problem

        p = problem
        x, w = _layouts(len(p["strides"]), p["channels_last"])
        sizes = p["x_spatial"], p["w_spatial"]
        g = ConvGeometry(x, w, x, p["strides"], p["padding"], p["dilation"], p["groups"], *sizes)
        found = ConvProblem(g, p["batch"], p["features"], p["out_features"], jnp.dtype(p["dtype"]))
        call = ConvCall(found, None, settings.current(), p["has_bias"])
        backend, pass_name = OneDnnBackend(), p["pass_name"]
        if backend.supports(pass_name, call) or backend.find_plan(pass_name, call):
            return None
        computed = computed_problem(pass_name, found)
        has_bias = p["has_bias"] and pass_name != "input_gradient"
        is_bfloat16 = computed.dtype == jnp.bfloat16
        lists = [*computed.shapes, *(v for v in g.attributes().values() if isinstance(v, list))]
        numbers = [_PASSES.index(pass_name), is_bfloat16, has_bias, p["whole_team"], p["one_of_several"]]
        for values in lists:
            numbers += [len(values), *values]
        return [int(number) for number in (*numbers, p["groups"])]

    def run(self, arguments: list[int] | None, at_end: bool) -> tuple[int, str]:
        """The status of the library, and the name of the kernel or what is wrong. None: a kernel that is faulty."""
        text = ctypes.create_string_buffer(500)
        numbers = (ctypes.c_int64 * len(arguments))(*arguments) if arguments else None
        status = self._library.guarded_conv(self._onednn, numbers, at_end, text, len(text))
        return status, text.value.decode()


def _serve(library: str, seed: int, first: int, last: int, progress: Path) -> None:
    """Runs problems, each of which is written to a file before it runs, so that it is known after a crash."""
    caller = Caller(library)
    counts: collections.Counter[str] = collections.Counter()
    wrong: list[str] = []
    with progress.open("w") as file:
        for number in range(first, last):
            problem = random_problem(random.Random(f"{seed} {number}"))
            arguments = caller.arguments(problem)
            for at_end in (True, False) if arguments else ():
                file.seek(0)
                file.write(json.dumps({"number": number, "counts": counts, "wrong": wrong, "problem": problem}))
                file.truncate()
                file.flush()
                status, text = caller.run(arguments, at_end)
                if status == _RIGHT:
                    counts[f"{problem['pass_name']} {text}"] += 1
                elif status != _NO_KERNEL:
                    wrong.append(f"{text}, {problem}")
        file.seek(0)
        file.write(json.dumps({"number": last, "counts": counts, "wrong": wrong, "problem": None}))
        file.truncate()


def _run(library: str, isa: str, threads: int, *options: str) -> subprocess.CompletedProcess[str]:
    """Runs this script with an instruction set. A process that does not end is one that fails."""
    environment = {**os.environ, "ONEDNN_MAX_CPU_ISA": isa, "OMP_NUM_THREADS": str(threads), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, __file__, library, *options]
    try:
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, 1, "", f"the process did not end within {_SECONDS} s")


def check_pages(library: str) -> None:
    """Checks that the pages end a process with a kernel that is known to write past its scratchpad."""
    for side in ("start", "end"):  # with more than one thread, the kernel overwrites a barrier and does not end
        process = _run(library, "AVX2", 1, "--faulty", side)
        reported = process.returncode == -signal.SIGSEGV or "AddressSanitizer: SEGV" in process.stderr
        if not reported and (process.returncode or "jit_1x1:avx2" in process.stdout):
            output = process.stdout + process.stderr
            raise SystemExit(f"the pages do not report a kernel that is known to be faulty: {output}")
    kernel = process.stdout.strip()
    print(
        f"no faulty kernel to check the pages with: {kernel}" if kernel else "the pages report a faulty kernel",
        flush=True,
    )


def run_instruction_set(library: str, isa: str, calls: int, seed: int) -> list[str]:
    """Runs random problems until there were as many calls. Prints a summary, and returns what is wrong."""
    counts: collections.Counter[str] = collections.Counter()
    wrong: list[str] = []
    number = 0
    with tempfile.TemporaryDirectory() as folder:
        progress = Path(folder, "progress")
        while counts.total() < calls:
            last = number + min(1000, 20 + (calls - counts.total()) // 2)  # most problems are two calls
            process = _run(library, isa, 3, "--seed", str(seed), "--serve", str(number), str(last), str(progress))
            if not progress.exists() or not (text := progress.read_text()):
                raise SystemExit(process.stderr)
            found = json.loads(text)
            counts.update(found["counts"])
            wrong += found["wrong"]
            number = found["number"]
            if process.returncode:
                if found["problem"] is None:
                    raise SystemExit(process.stderr)
                wrong.append(f"the process ended with {process.returncode}, {found['problem']}")
                number += 1
            progress.unlink()
    kernels = ", ".join(f"{name} {count}" for name, count in sorted(counts.items()))
    print(f"{isa}: {counts.total()} calls, {len(wrong)} wrong. {kernels}", flush=True)
    return [f"{isa}: {text}" for text in wrong]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("library")
    parser.add_argument("--calls", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--isa", nargs="+", default=INSTRUCTION_SETS)
    parser.add_argument("--faulty", choices=("start", "end"), help=argparse.SUPPRESS)
    parser.add_argument("--serve", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.faulty:
        print(Caller(options.library).run(None, options.faulty == "end")[1])
        return
    if options.serve:
        first, last, progress = options.serve
        _serve(options.library, options.seed, int(first), int(last), Path(progress))
        return
    library = os.path.abspath(options.library)
    check_pages(library)
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:  # much of the time is the start of processes
        found = pool.map(lambda isa: run_instruction_set(library, isa, options.calls, options.seed), options.isa)
        wrong = [text for texts in found for text in texts]
    print("\n".join(wrong))
    raise SystemExit(bool(wrong))


if __name__ == "__main__":
    main()
