"""Refuses to run from a source checkout without compiled kernels, which would hide an installed jaxgrad."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

_PACKAGE = Path(__file__).parents[2]


def require_compiled_kernels() -> None:
    """Raises ImportError where the package is imported from a checkout that was not built."""
    is_checkout = (_PACKAGE.parent / "pyproject.toml").is_file() and (_PACKAGE.parent / "ffi").is_dir()
    if is_checkout and "jaxgrad._cpu" not in sys.modules and find_spec("jaxgrad._cpu") is None:
        raise ImportError(
            f"jaxgrad is imported from the source checkout {_PACKAGE.parent}, which has no compiled kernels. Build "
            "them with `pip install -e .` in that directory, or import an installed jaxgrad: start Python "
            "in another directory, or with `python -P`."
        )
