"""`python -m jaxgrad` prints what a bug report needs: versions, handlers, devices, and the selection for each op.

`python -m jaxgrad bench` measures the ops.
"""

from __future__ import annotations

import argparse
import platform
import sys
from collections.abc import Iterator, Sequence
from importlib.metadata import version

import jax
import numpy as np

import jaxgrad
from jaxgrad._src.accelerate.lowering import install
from jaxgrad._src.bench import command
from jaxgrad._src.choice.explain import explanation
from jaxgrad._src.choice.op import op_of
from jaxgrad._src.choice.selection import select_typical
from jaxgrad._src.native import cpu, cuda


def _runtime_ffi_api() -> str:
    """The FFI API version of the installed jaxlib, from the header that it contains."""
    header = f"{jax.ffi.include_dir()}/xla/ffi/api/c_api.h"
    found = {}
    try:
        with open(header, encoding="utf-8") as lines:
            for line in lines:
                words = line.split()
                if len(words) == 3 and words[0] == "#define" and words[1].startswith("XLA_FFI_API_M"):
                    found[words[1]] = words[2]
    except OSError as error:
        return f"unknown ({error})"
    return f"{found.get('XLA_FFI_API_MAJOR', '?')}.{found.get('XLA_FFI_API_MINOR', '?')}"


def _devices() -> Iterator[str]:
    try:
        for device in jax.devices():
            yield f"{device.platform}:{device.id} {device.device_kind}"
    except RuntimeError as error:
        yield f"none: {error}"


def _platforms() -> list[str]:
    try:
        return list(dict.fromkeys(["cpu", jax.default_backend()]))
    except RuntimeError:  # JAX has no device
        return ["cpu"]


def _cpu() -> Iterator[tuple[str, str]]:
    if problem := cpu.unavailable():
        yield "CPU kernels", f"missing: {problem}"
        return
    problem = cpu.onednn_unavailable()
    build = cpu.build_info()
    yield (
        "CPU kernels",
        f"built for FFI API {build['ffi_api']} with {build['compiler']}, using {build['instruction_set']}",
    )
    library, others = cpu.find_onednn()
    yield "oneDNN", f"missing: {problem}" if problem else "; not used: ".join((str(library), *others))
    yield "CPU handlers", ", ".join(cpu.targets())


def _cuda() -> Iterator[tuple[str, str]]:
    """The CUDA module, cuDNN and NVRTC, which may be installed on a machine without a GPU."""
    problem = cuda.cudnn_unavailable()
    if not cuda.build_info():
        yield "CUDA kernels", f"missing: {problem}"
        return
    try:
        nvrtc_problem = cuda.nvrtc_unavailable()
    except RuntimeError as error:
        nvrtc_problem = str(error)
    build = cuda.build_info()
    yield (
        "CUDA kernels",
        f"built for FFI API {build['ffi_api']} with {build['compiler']}, headers of cuDNN {build['cudnn_headers']}",
    )
    yield "cuDNN", build["cudnn"] or f"missing: {problem}"
    yield "NVRTC", build["nvrtc"] or f"missing: {nvrtc_problem}"
    yield "CUDA handlers", ", ".join(cuda.targets())


def report() -> Iterator[tuple[str, str]]:
    """Yields the lines of the diagnosis, as (label, text)."""
    yield "jaxgrad", f"{jaxgrad.__version__} from {jaxgrad.__path__[0]}"
    yield "python", f"{platform.python_version()} on {platform.platform()}"
    yield "jax", jax.__version__
    yield "jaxlib", f"{version('jaxlib')}, FFI API {_runtime_ffi_api()}"
    yield "numpy", np.__version__
    for device in _devices():
        yield "device", device
    yield from _cpu()
    yield from _cuda()
    problem = install()
    yield "accelerate", problem or f"available on jax {jax.__version__}"
    for op in filter(None, (op_of(getattr(jaxgrad, name)) for name in jaxgrad.__all__)):
        for name in _platforms():
            yield "op", str(explanation(select_typical(op, None), name))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m jaxgrad", description="Without a command, prints versions, libraries, devices and selections."
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    command.add_options(commands.add_parser("bench", help="measure jaxgrad's ops against XLA and PyTorch"))
    args = parser.parse_args(arguments)
    if args.command == "bench":
        return command.run(args)
    for label, text in report():
        print(f"{label:<13} {text}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
