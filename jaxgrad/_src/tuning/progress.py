"""A line on stderr that says which of some measurements is running."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import TypeVar

_T = TypeVar("_T")


def with_progress(command: str, items: Iterable[tuple[str, _T]]) -> Iterator[tuple[str, _T]]:
    """Yields the items, which have a text each. A terminal shows one line that changes, a file gets a line for each."""
    items = list(items)
    is_terminal = sys.stderr.isatty()
    try:
        for index, (text, item) in enumerate(items, 1):
            line = f"{command} {index}/{len(items)} {text}"
            shown = f"\r{line:.79}\x1b[K" if is_terminal else f"{line}\n"
            print(shown, end="", file=sys.stderr, flush=True)
            yield text, item
    finally:
        if is_terminal:
            print("\r\x1b[K", end="", file=sys.stderr)
