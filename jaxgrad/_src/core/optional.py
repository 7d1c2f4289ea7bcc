"""Packages that only some modules of jaxgrad need, and the modules that need them."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Collection
from types import ModuleType


def require(package: str, extra: str, module: str) -> None:
    """Raises an ImportError that names the extra to install, if `package` is missing."""
    try:
        importlib.import_module(package)
    except ModuleNotFoundError as error:
        if error.name != package:
            raise
        raise ImportError(f"{module} requires {package}: pip install 'jaxgrad[{extra}]'", name=package) from error


def lazy_submodules(
    package: str, public: Collection[str], names: Collection[str]
) -> tuple[Callable[[str], ModuleType], Callable[[], list[str]]]:
    """Returns `__getattr__` and `__dir__` for a package with the names `public`.

    `__getattr__` imports a submodule of `names` where it is first used.
    """

    def load(name: str) -> ModuleType:
        if name in names:
            return importlib.import_module(f"{package}.{name}")
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return load, lambda: sorted([*public, *names])
