"""How scripts in processes of their own hand results to the tests that run them."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any


def report(**found: Any) -> None:
    """Hands values to the test: as JSON, or as text where JSON has no such type."""
    print(json.dumps(found, default=str))


def outcome(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The result of a function, or the text of the error that it raises."""
    try:
        return function(*args, **kwargs)
    except (RuntimeError, ValueError) as error:  # NotImplementedError is a RuntimeError
        return f"{type(error).__name__}: {error}"
