"""Freed memory is kept: writing to it again costs no page faults."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

_PROGRAM = """
import ctypes
import resource
import sys

from benchmarks.memory import keep_freed_memory

if sys.argv[1] == "kept":
    keep_freed_memory()
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
for _ in range(4):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    memory = libc.malloc(1 << 26)
    ctypes.memset(memory, 1, 1 << 26)
    libc.free(memory)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.parametrize(("name", "is_kept"), [("kept", True), ("as usual", False)])
def test_freed_memory(name, is_kept):
    top = Path(__file__).parents[2]
    environment = {
        name: value for name, value in os.environ.items() if name not in ("GLIBC_TUNABLES", "PYTHONSAFEPATH")
    }
    command = [sys.executable, "-c", _PROGRAM, name]
    run = subprocess.run(command, cwd=top, env=environment, capture_output=True, text=True, check=True, timeout=60)
    assert (int(run.stdout) < 10) == is_kept, run.stdout  # 16 are left where Linux grants huge pages to all
