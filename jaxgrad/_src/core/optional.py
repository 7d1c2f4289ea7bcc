"""Packages that only some modules of jaxgrad need."""

from __future__ import annotations

import importlib


def require(package: str, extra: str, module: str) -> None:
    """Raises an ImportError that names the extra to install, if `package` is missing."""
    try:
        importlib.import_module(package)
    except ModuleNotFoundError as error:
        if error.name != package:
            raise
        raise ImportError(f"{module} requires {package}: pip install 'jaxgrad[{extra}]'", name=package) from error
