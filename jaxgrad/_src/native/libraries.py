"""Finds the shared libraries that come in installed Python packages."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Sequence


def library_paths(packages: Sequence[str], names: Sequence[str]) -> list[str]:
    """Returns the paths of the files with one of the `names` in the installed ones of the `packages`."""
    found = []
    for package in packages:
        try:
            files = importlib.metadata.files(package) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        found += [str(file.locate()) for file in files if file.name in names]
    return found


def is_installed(package: str) -> bool:
    """Whether a Python package is installed."""
    try:
        importlib.metadata.files(package)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
