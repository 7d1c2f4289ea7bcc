"""Cases of named networks on the command line: name,size,size or name,size,size,bf16."""

from __future__ import annotations

import argparse
from collections.abc import Collection

_DTYPES = {"f32": "float32", "bf16": "bfloat16"}


def parse(text: str, names: Collection[str], sizes: int, usage: str | None) -> tuple[str, list[int], str]:
    """The name, so many sizes and the dtype. `usage` is for the error."""
    name, *rest = text.split(",")
    dtype = _DTYPES.get(rest.pop()) if len(rest) == sizes + 1 else "float32"
    valid = name in names and len(rest) == sizes and all(size.isdecimal() and int(size) > 0 for size in rest)
    if dtype is None or not valid:
        raise argparse.ArgumentTypeError(f"must be {usage}, got {text!r}; names are {', '.join(names)}")
    return name, [int(size) for size in rest], dtype
