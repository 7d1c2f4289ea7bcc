"""Random sizes, settings and absent arrays: values and all gradients against the float64 reference."""

from __future__ import annotations

import zlib

import gru_references
import jax
import numpy as np
import pytest
from backends import CPU_KERNEL, CUDA, GRU
from gru_cases import Case, fill_padding, make_inputs
from gru_groups import values_and_gradients_of_groups
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
LOPSIDED = st.builds(
    Case,
    T=st.sampled_from((1, 2, 3, 5, 8, 11, 21, 64)),
    B=st.sampled_from((1, 2, 7, 8, 9, 16, 17, 33, 64, 100, 300)),
    I=st.sampled_from((1, 3, 20, 64, 129)),
    H=st.sampled_from((1, 16, 31, 43, 64, 65, 96, 127, 128, 129, 200, 255, 256, 257, 300, 513, 700, 1024, 2048)),
    direction=st.sampled_from(("forward", "reverse", "bidirectional")),
    linear_before_reset=st.booleans(),
    clip=st.sampled_from([None, None, None, 0.6]),
    b=st.booleans(),
    sequence_lens=st.booleans(),
    initial_h=st.booleans(),
    reset=st.booleans(),
    reset_h=st.booleans(),
    seed=st.integers(0, 99),
)


def _problems(widest):
    """Cases of up to `widest` hidden units, and numbers of groups. Those with many units have few steps and rows."""

    def is_small(problem):
        case, groups = problem
        return widest >= case.H and groups * case.T * case.B * case.H * max(case.H, 512) <= 2**30

    return st.tuples(LOPSIDED, st.sampled_from((1, 1, 1, 3))).filter(is_small)


# Of each part: the dtype, the precision, and the most hidden units.
_KINDS_OF_PARTS = (
    ("float32", "highest", 768),
    ("bfloat16", "highest", 2048),
    ("float32", "tensorfloat32", 1024),
    ("float16", "highest", 2048),
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


def _inputs_of(case, dtype):
    """Inputs and cotangents. With `clip`, no gate is so close to the bound that rounding could clip it.

    The pre-activations then are near to their biases: zero, or twice the bound.
    """
    inputs, cotangents = make_inputs(case, dtype)
    if case.clip is None:
        return inputs, cotangents
    biases = np.random.default_rng(case.seed).choice([-2, 0, 2], (case.D, 6 * case.H)) * case.clip
    biases[:, 3 * case.H :] = 0
    small = {name: (getattr(inputs, name) / 64).astype(inputs.x.dtype) for name in ("w", "r")}
    return inputs._replace(b=biases.astype(inputs.x.dtype), **small), cotangents


@pytest.mark.gpu
@pytest.mark.parametrize("part", thorough_after(4, range(100)))
def test_lopsided_problems_on_the_cuda_kernels(part):
    """Twenty problems against the CPU kernels in float64, and one in ten of them against the reference too."""
    dtype, precision, widest = _KINDS_OF_PARTS[part % len(_KINDS_OF_PARTS)]
    rounding = precision if precision == "tensorfloat32" else None

    @seed(part)
    @settings(max_examples=20, deadline=None, database=None)
    @given(_problems(widest))
    def sweep(problem):
        case, groups = problem
        drawn = [_inputs_of(case.replace(seed=case.seed + 100 * group), dtype) for group in range(groups)]
        padded = [(fill_padding(inputs, np.nan), cotangents) for inputs, cotangents in drawn]
        with jax.default_matmul_precision(precision):
            if groups == 1:
                found = [values_and_gradients(CUDA, *padded[0], case.settings)]
            else:
                found = values_and_gradients_of_groups(CUDA, padded, case.settings)
        for of_group, (inputs, cotangents) in zip(found, drawn, strict=True):
            wide = jax.tree.map(lambda a: a if a.dtype.kind in "bi" else a.astype(np.float64), (inputs, cotangents))
            expected = [values_and_gradients(CPU_KERNEL, *wide, case.settings)]
            if case.seed % 10 == 9:
                expected.append(gru_references.values_and_gradients(inputs, cotangents, **case.settings))
            with jax.default_matmul_precision(precision):
                for one in expected:
                    assert_results_close(of_group, one, dtype=dtype, terms=case.terms, backend=CUDA, rounding=rounding)

    sweep()
