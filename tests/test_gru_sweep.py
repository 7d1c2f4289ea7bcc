"""A sweep over random lopsided calls: values and all gradients, with whatever settings and absent arrays come up."""

from __future__ import annotations

import numpy as np
import pytest
import references
from cases import Case
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from running import check

# Sizes around the lengths of vectors and the blocks of the kernels, and away from them; few enough combinations for
# calls to share the compilation of their reference.
_RNG = np.random.default_rng(20)
SIZES = [
    {
        "T": int(_RNG.integers(1, 9)),
        "B": int(_RNG.integers(1, 21)),
        "I": int(_RNG.choice([1, 2, 3, 5, 8, 13, 16, 17, 33, 50])),
        "H": H,
    }
    for H in (1, 2, 3, 4, 5, 7, 8, 9, 11, 12, 15, 16, 17, 20, 23, 24, 31, 32, 33, 40, 47, 48, 50, 65)
]

CASES = st.builds(
    lambda sizes, **settings: Case(**sizes, **settings),
    st.sampled_from(SIZES),
    direction=st.sampled_from(["forward", "reverse", "bidirectional"]),
    linear_before_reset=st.booleans(),
    clip=st.sampled_from([None, None, 0.6]),
    b=st.booleans(),
    sequence_lens=st.booleans(),
    initial_h=st.booleans(),
    seed=st.integers(0, 99),
)
_COUNT = {"cpu": 100, "xla": 30}  # XLA compiles for a second each, and does not care for sizes as a kernel does


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_random_calls(target, dtype):
    @settings(max_examples=_COUNT[target.implementation], deadline=None, derandomize=True, database=None)
    @given(CASES)
    def sweep(case):
        assume(references.is_clear_of_the_bounds(case, dtype))
        check(target, case, dtype)

    sweep()
