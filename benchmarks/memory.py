"""Memory of the process, whose page faults would be measured with the calls."""

from __future__ import annotations

import ctypes

# The parameters of mallopt(3).
_M_TRIM_THRESHOLD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -4, -8
_MAX_INT = 2**31 - 1


def keep_freed_memory() -> None:
    """Lets glibc keep what the process frees from now on, and give it out again.

    Otherwise large results are new memory, whose first write costs a page fault for every 4 kB, in some processes and
    not in others: a convolution on a CPU takes up to three times as long with them.
    """
    libc = ctypes.CDLL(None)
    for parameter, value in ((_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, _MAX_INT), (_M_ARENA_MAX, 1)):
        if not libc.mallopt(parameter, value):
            raise RuntimeError(f"mallopt({parameter}, {value}) failed")
