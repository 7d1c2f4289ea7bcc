"""Finds the shared libraries that come in installed Python packages."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Sequence


def library_paths(packages: Sequence[str], names: Sequence[str]) -> list[str] | None:
    """Returns the paths of the files with one of the `names` in the `packages`; None if no package is installed."""
    found: list[str] | None = None
    for package in packages:
        try:
            files = importlib.metadata.files(package) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        found = [*(found or []), *(str(file.locate()) for file in files if file.name in names)]
    return found
