"""Random sizes, settings and absent arrays: values and all gradients against the float64 reference."""

from __future__ import annotations

import zlib

import gru_references
import pytest
from gru_cases import Case
from gru_running import check
from hypothesis import assume, given, seed, settings
from hypothesis import strategies as st
from thorough import thorough_after

# Sizes near the vector lengths and the blocks of the kernels, and others.
_SIZES_OF_INPUT = (1, 2, 3, 5, 8, 13, 16, 17, 33, 50)
_SIZES_OF_STATE = (1, 2, 3, 4, 7, 8, 9, 15, 16, 17, 24, 31, 33, 48, 50, 65)

CASES = st.builds(
    Case,
    T=st.integers(1, 9),
    B=st.integers(1, 20),
    I=st.sampled_from(_SIZES_OF_INPUT),
    H=st.sampled_from(_SIZES_OF_STATE),
    linear_before_reset=st.booleans(),
    clip=st.sampled_from([None, None, 0.6]),
    b=st.booleans(),
    sequence_lens=st.booleans(),
    initial_h=st.booleans(),
    reset=st.booleans(),
    reset_h=st.booleans(),
    seed=st.integers(0, 99),
)
_COUNT = {"cpu": 68, "xla": 12}  # of each direction; XLA compiles each case for a second, and sizes matter less


@pytest.mark.parametrize("part", thorough_after(1, [0.25, 1]))
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("direction", ["forward", "reverse", "bidirectional"])
def test_values_and_gradients(backend, direction, dtype, part):
    @seed(zlib.crc32(f"{direction} {dtype}".encode()))  # other cases for each
    @settings(max_examples=int(part * _COUNT[backend.implementation]), deadline=None, database=None)
    @given(CASES)
    def sweep(case):
        case = case.replace(direction=direction)
        assume(gru_references.is_clear_of_the_bounds(case, dtype))
        check(backend, case, dtype)

    sweep()
