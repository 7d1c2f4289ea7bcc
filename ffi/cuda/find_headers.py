"""Prints the include directories of the CUDA module as a CMake list; exits with 1 if a package is missing."""

from __future__ import annotations

import importlib.metadata
import sys

# Each header and the packages that may contain it. Some packages for CUDA 13 have no suffix.
HEADERS = {
    "cudnn_graph.h": ("nvidia-cudnn-cu12", "nvidia-cudnn-cu13"),
    "cuda_runtime_api.h": ("nvidia-cuda-runtime-cu12", "nvidia-cuda-runtime"),
    "crt/host_defines.h": ("nvidia-cuda-nvcc-cu12", "nvidia-cuda-crt"),
}


def directory_of(header: str, packages: tuple[str, ...]) -> str:
    for package in packages:
        try:
            files = importlib.metadata.files(package) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        for file in files:
            if str(file).endswith(f"include/{header}"):
                return str(file.locate())[: -len(header) - 1]
    print(f"{header} is not installed; it is part of {' or '.join(packages)}", file=sys.stderr)
    sys.exit(1)


print(";".join(directory_of(header, packages) for header, packages in HEADERS.items()))
