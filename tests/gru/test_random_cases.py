"""Random sizes, settings and absent arrays: values and all gradients against the float64 reference."""

from __future__ import annotations

import zlib

import gru_references
import jax
import numpy as np
import pytest
from backends import CPU_KERNEL, CUDA, GRU
from gru_cases import Case, fill_padding, make_inputs
from gru_running import check, values_and_gradients
from hypothesis import assume, given, seed, settings
from hypothesis import strategies as st
from thorough import thorough_after
from tolerances import assert_results_close

BACKENDS = GRU

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
_COUNT = {"cpu": 68, "cuda": 68, "xla": 12}  # of each direction; XLA compiles each case for a second

# Sizes around the tiles of the CUDA kernels: 32 hidden units and 8 rows; more than 256 units for those of teams.
# T * B * H stays below 2^21.
LOPSIDED = st.builds(
    Case,
    T=st.sampled_from((1, 2, 3, 5, 8, 21, 64)),
    B=st.sampled_from((1, 2, 7, 8, 9, 16, 17, 33, 64, 100, 300)),
    I=st.sampled_from((1, 3, 20, 64, 129)),
    H=st.sampled_from((1, 16, 31, 43, 64, 65, 96, 127, 128, 129, 200, 255, 256, 257, 300, 513)),
    direction=st.sampled_from(("forward", "reverse", "bidirectional")),
    linear_before_reset=st.booleans(),
    b=st.booleans(),
    sequence_lens=st.booleans(),
    initial_h=st.booleans(),
    reset=st.booleans(),
    reset_h=st.booleans(),
    seed=st.integers(0, 99),
).filter(lambda case: case.T * case.B * case.H <= 2**21)
_KINDS_OF_PARTS = (
    ("float32", "highest"),
    ("bfloat16", "highest"),
    ("float32", "tensorfloat32"),
    ("float16", "highest"),
)


@pytest.mark.parametrize("part", thorough_after(1, [0.25, 1]))
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("direction", ["forward", "reverse", "bidirectional"])
def test_values_and_gradients(backend, direction, dtype, part):
    if dtype == "float64" and backend.widest != dtype:
        pytest.skip("the kernels do not compute float64")

    @seed(zlib.crc32(f"{direction} {dtype}".encode()))  # other cases for each
    @settings(max_examples=int(part * _COUNT[backend.implementation]), deadline=None, database=None)
    @given(CASES)
    def sweep(case):
        case = case.replace(direction=direction)
        assume(gru_references.is_clear_of_the_bounds(case, dtype))
        check(backend, case, dtype)

    sweep()


@pytest.mark.gpu
@pytest.mark.parametrize("part", thorough_after(4, range(100)))
def test_lopsided_problems_on_the_cuda_kernels(part):
    """Twenty problems against the CPU kernels in float64."""
    dtype, precision = _KINDS_OF_PARTS[part % len(_KINDS_OF_PARTS)]
    rounding = precision if precision == "tensorfloat32" else None

    @seed(part)
    @settings(max_examples=20, deadline=None, database=None)
    @given(LOPSIDED)
    def sweep(case):
        inputs, cotangents = make_inputs(case, dtype)
        wide = jax.tree.map(lambda a: a if a.dtype.kind in "bi" else a.astype(np.float64), (inputs, cotangents))
        expected = values_and_gradients(CPU_KERNEL, *wide, case.settings)
        with jax.default_matmul_precision(precision):
            found = values_and_gradients(CUDA, fill_padding(inputs, np.nan), cotangents, case.settings)
            assert_results_close(found, expected, dtype=dtype, terms=case.terms, backend=CUDA, rounding=rounding)

    sweep()
