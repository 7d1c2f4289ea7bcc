"""Where a call transposes its result by jaxgrad's own kernel: ffi/cuda/transposition.cc.

XLA's transpositions of elements of 2 bytes take several times as long. Those that only move rows of neighbouring
elements, or nothing at all, are XLA's: it does the former well, and the latter without a copy. But where axes are
reversed on the way, XLA is slow with rows too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache

import jax

from jaxgrad._ffi.registration import cuda, nvrtc_problem

_MOST_ELEMENTS = (1 << 31) - 1


@cache
def transposition_problem(device: int | None) -> str:
    """Why calls cannot transpose their results on a GPU; empty when they can, and the kernels are then loaded there.

    Without a GPU here nobody knows whether NVRTC, which compiles the kernels, is there where the program runs.

    Raises RuntimeError where they cannot be loaded and other processes, where they can be, wait for the same program.
    """
    if device is None:
        return "there is no GPU here"
    if problem := nvrtc_problem():
        return problem
    try:
        cuda.load_transposition(device)
    except RuntimeError as error:
        if jax.process_count() > 1:
            raise
        return str(error)
    return ""


def takes_transposition(
    sizes: Sequence[int], spec: Sequence[int], wanted: Sequence[int], turned: Sequence[int] = ()
) -> bool:
    """Whether the kernel takes arrays from where `spec` puts axes of these sizes to where `wanted` does.

    The axes in `turned` are reversed on the way. What the kernel cannot reverse are the elements of rows that stay
    rows, and an array in which nothing moves besides is XLA's too.
    """
    if math.prod(sizes) > _MOST_ELEMENTS:
        return False
    last = _innermost(sizes, spec)
    if last != _innermost(sizes, wanted):
        return True
    turns = any(sizes[axis] > 1 for axis in turned)
    return turns and last not in turned and tuple(spec) != tuple(wanted)


def _innermost(sizes: Sequence[int], spec: Sequence[int]) -> int | None:
    """The axis whose elements lie side by side."""
    return max((axis for axis, size in enumerate(sizes) if size > 1), key=lambda axis: spec[axis], default=None)
