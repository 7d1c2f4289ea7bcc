"""Warnings that point at the caller's line, not into jaxgrad."""

from __future__ import annotations

import contextlib
import os
import sys
import warnings

import jax


def _folder(file: str, levels: int) -> str:
    for _ in range(levels):
        file = os.path.dirname(file)
    return os.path.abspath(file) + os.sep


# JAX traces jaxgrad's functions, and contextlib calls those that are decorated with a context manager.
_INNER = _folder(__file__, 3), _folder(jax.__file__, 1), os.path.abspath(contextlib.__file__)


def warn_caller(message: str, category: type[Warning]) -> None:
    """Issues a warning whose location is the innermost frame outside jaxgrad and JAX."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and os.path.abspath(frame.f_code.co_filename).startswith(_INNER):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)
