"""`python -m benchmarks norm`: the contenders agree, and the roofline counts the bytes."""

from __future__ import annotations

import argparse

import benchmarks_package  # noqa: F401
import numpy as np
import pytest

from benchmarks import compare, norm, tables
from benchmarks.contender_names import FLAX, OURS, OURS_ON_XLA
from benchmarks.options import Effort, Options

_FEW = Options(Effort(1, 0), frozenset({FLAX, OURS_ON_XLA}))
_BYTES = {  # of each element of x that is read or written: forward, and forward + backward
    "batch-norm 2x8x8x16": (2 * 4, 5 * 4),
    "batch-norm 2x8x8x16 relu residual bf16": (3 * 2, 7.125 * 2),
    "layer-norm 8x16 bf16": (2 * 2, 5 * 2),
}


@pytest.mark.parametrize("case", norm.QUICK_CASES, ids=lambda case: case.label)
def test_every_norm_is_measured(monkeypatch, case):
    """Measuring compares the results of the contenders."""
    monkeypatch.setattr(compare, "memory_gbps", lambda: 1.0)
    found = norm.measure([case], _FEW)
    forward, both = found["rows"]
    contenders = [OURS, *[OURS_ON_XLA] * (case.explanation().implementation != "xla"), FLAX]
    assert list(forward["times_ms"]) == list(both["times_ms"]) == contenders
    assert sum(line.startswith(f"{case.label}  ") for line in tables.text(found).splitlines()) == 2
    if case.label in _BYTES:
        size = np.prod(case.shape)
        assert (forward["bytes_moved"], both["bytes_moved"]) == tuple(size * each for each in _BYTES[case.label])


@pytest.mark.parametrize("text", ["norm:8x16", "batch-norm", "layer-norm:8x16,residual=1", "rms-norm:8x16,groups=2"])
def test_texts_that_are_no_norm(text):
    with pytest.raises(argparse.ArgumentTypeError):
        norm.parse_case(text)


def test_a_parsed_case_is_that_of_the_benchmark():
    text = "batch-norm:64x28x28x128,activation=relu,residual,dtype=bf16"
    assert norm.parse_case(text) in norm.CASES["gpu"]
