"""A progress bar on stderr, which says which of some measurements is running."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterable, Iterator
from typing import TypeVar

_T = TypeVar("_T")
_BAR = 20  # characters


def with_progress(command: str, items: Iterable[tuple[str, _T]]) -> Iterator[tuple[str, _T]]:
    """Yields the items, which have a text each. A terminal shows a bar that grows, a file gets a line for each."""
    items = list(items)
    is_terminal = sys.stderr.isatty()
    try:
        for index, (text, item) in enumerate(items, 1):
            counted = f"{index}/{len(items)} {text}"
            if is_terminal:
                done = "#" * (_BAR * (index - 1) // len(items))
                line = f"{command} [{done:.<{_BAR}}] {counted}"[: shutil.get_terminal_size().columns - 1]
                print(f"\r{line}\x1b[K", end="", file=sys.stderr, flush=True)
            else:
                print(f"{command} {counted}", file=sys.stderr, flush=True)
            yield text, item
    finally:
        if is_terminal:
            print("\r\x1b[K", end="", file=sys.stderr)
