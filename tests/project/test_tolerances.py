"""The tolerances of the suite follow the precision of products."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from backends import CPU_KERNEL, CUDA, CUDNN, XLA, XLA_ON_GPU
from tolerances import DTYPES, EPS, assert_close, chained_rounding, tolerance

_ONES = np.ones(10)


@pytest.mark.parametrize("backend", [XLA_ON_GPU, CUDNN, CUDA], ids=str)
def test_float32_on_a_gpu_allows_tf32_at_the_default_precision(backend):
    with jax.default_matmul_precision(None):
        assert tolerance("float32", _ONES, 100, backend) == 4 * EPS["tensorfloat32"]
        assert chained_rounding(backend) == "chained tensorfloat32"
        assert tolerance("bfloat16", _ONES, 100, backend) == 2 * EPS["bfloat16"]
        assert_close(np.float32(_ONES + 3e-3), _ONES, dtype="float32", terms=100, backend=backend)
        with pytest.raises(AssertionError):
            assert_close(np.float32(_ONES + 5e-3), _ONES, dtype="float32", terms=100, backend=backend)
    with jax.default_matmul_precision("highest"):
        assert tolerance("float32", _ONES, 100, backend) < 30 * EPS["float32"]
        assert chained_rounding(backend) is None


@pytest.mark.parametrize("backend", [CPU_KERNEL, XLA, None], ids=str)
def test_float32_is_exact_otherwise(backend):
    """On a CPU, and for ops without products, which name no backend."""
    for precision in (None, "highest"):
        with jax.default_matmul_precision(precision):
            assert tolerance("float32", _ONES, 100, backend) == 18 * EPS["float32"]
            assert chained_rounding(backend) is None


def test_rounding_is_of_float32_alone():
    off = (_ONES + 2.5e-2).astype(DTYPES["bfloat16"])
    with pytest.raises(AssertionError):
        assert_close(off, _ONES, dtype="bfloat16", terms=100, rounding="chained tensorfloat32")
    assert_close(np.float32(off), _ONES, dtype="float32", terms=100, rounding="chained tensorfloat32")
