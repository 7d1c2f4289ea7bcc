"""Finds oneDNN: the library of a Python package or that of the system, whichever is newer."""

from __future__ import annotations

import os
import platform
from typing import Any, NamedTuple

from jaxgrad._src.native.libraries import library_paths

VARIABLE = "JAXGRAD_ONEDNN"  # "package", "system" or the path of a library
PACKAGE = "onednn-cpu-gomp"
_PACKAGE_LIBRARY = "libdnnl.so.3"
_SYSTEM_LIBRARIES = ("libdnnl.so.3", "libdnnl.so.3.6")  # Debian has the second name, for all releases from 3.6 on


class Library(NamedTuple):
    """A oneDNN that can be used. The larger tuple is preferred: the newer version, then the package."""

    version: tuple[int, int, int]
    from_package: bool
    threads: str  # "OpenMP", "TBB" or "sequential"
    path: str

    def __str__(self) -> str:
        origin = f"package {PACKAGE}" if self.from_package else self.path
        return f"{'.'.join(map(str, self.version))}, {self.threads}, {origin}"


class Search(NamedTuple):
    """The library to use, if there is one, and why others are not used."""

    library: Library | None
    others: tuple[str, ...]


def find(module: Any) -> Search:
    """Finds the library that the compiled module `jaxgrad._cpu` can use. Opens what it finds, to read the versions.

    Raises:
      ValueError: the environment variable JAXGRAD_ONEDNN is not valid.
    """
    choice = os.environ.get(VARIABLE, "")
    if choice not in ("", "package", "system") and "/" not in choice:
        raise ValueError(f"jaxgrad: {VARIABLE} must be 'package', 'system' or a path, got {choice!r}")
    if "/" in choice:
        found = [_open(module, choice)]
    else:
        # The system first: of a name, the dynamic linker returns a library that is open already.
        found = [_in_system(module)] if choice != "package" else []
        found += [_in_package(module)] if choice != "system" else []
    libraries = sorted((one for one in found if isinstance(one, Library)), reverse=True)
    problems = [one for one in found if isinstance(one, str)]
    return Search(libraries[0] if libraries else None, (*problems, *(f"{one} (not newer)" for one in libraries[1:])))


def _in_package(module: Any) -> Library | str:
    paths = library_paths((PACKAGE,), (_PACKAGE_LIBRARY,))
    if paths is None:
        machine = platform.machine()
        return f"the package {PACKAGE} is not installed" + (
            "" if machine == "x86_64" else f" (it does not exist for {machine})"
        )
    return _open(module, paths[0], from_package=True) if paths else f"the package {PACKAGE} has no {_PACKAGE_LIBRARY}"


def _in_system(module: Any) -> Library | str:
    for name in _SYSTEM_LIBRARIES:
        found = _open(module, name)
        # The dynamic linker names the file that it does not find, which may also be a library that oneDNN needs.
        if isinstance(found, Library) or not found.startswith(f"{name}: cannot open shared object file"):
            return found
    return f"the system has no {' or '.join(_SYSTEM_LIBRARIES)}"


def _open(module: Any, path: str, from_package: bool = False) -> Library | str:
    try:
        version, threads, location = module.describe_onednn(path)
    except RuntimeError as error:
        return str(error)
    return Library(tuple(version), from_package, threads, location)
