"""Runs emulated kernels on arrays that touch pages without access. A wrong access ends the process.

    python guarded_call.py CALLS.json ARRAYS.npz end|start

CALLS.json has for each library its path, and the sizes, the number and the grid that its function `run` takes.
ARRAYS.npz has the bytes of the arrays, numbered; absent numbers are null pointers. Each array ends where a page without
access begins, or starts where one ends. Writes the arrays back.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import sys
from pathlib import Path

import numpy as np

_READ_AND_WRITE, _PRIVATE_AND_ANONYMOUS = 3, 0x22
_COUNT = 16  # of arrays


def _guarded(content: np.ndarray, at_end: bool) -> np.ndarray:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long
    libc.mprotect.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    inner = -(-content.size // mmap.PAGESIZE) * mmap.PAGESIZE
    base = libc.mmap(None, inner + 2 * mmap.PAGESIZE, _READ_AND_WRITE, _PRIVATE_AND_ANONYMOUS, -1, 0)
    first = base + mmap.PAGESIZE
    assert libc.mprotect(base, mmap.PAGESIZE, 0) == 0
    assert libc.mprotect(first + inner, mmap.PAGESIZE, 0) == 0
    start = first + (inner - content.size if at_end else 0)
    array = np.frombuffer((ctypes.c_ubyte * content.size).from_address(start), np.uint8)
    array[:] = content
    return array


def main(calls: str, path: str, side: str) -> None:
    with np.load(path) as stored:
        arrays = {name: _guarded(stored[name], side == "end") for name in stored.files}
    found = [arrays.get(str(i)) for i in range(_COUNT)]
    pointers = (ctypes.c_void_p * _COUNT)(*[None if a is None else a.ctypes.data for a in found])
    sizes_of_arrays = (ctypes.c_longlong * _COUNT)(*[0 if a is None else a.size for a in found])
    for library, sizes, number, grid in json.loads(Path(calls).read_text()):
        run = ctypes.CDLL(library).run
        run((ctypes.c_int * len(sizes))(*sizes), ctypes.c_float(number), pointers, sizes_of_arrays, *grid)
    np.savez(path, **arrays)


if __name__ == "__main__":
    main(*sys.argv[1:])
