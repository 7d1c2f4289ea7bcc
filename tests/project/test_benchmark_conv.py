"""The benchmarks of convolutions: rooflines in multiply-adds, and the implementation of a vendor beside jaxgrad's."""

from __future__ import annotations

import dataclasses
import re

import benchmarks_package  # noqa: F401
import jax
import jax.numpy as jnp
import pytest

from benchmarks import compare, conv, roofline
from benchmarks.contender_names import OURS, OURS_ON_CUDNN, OURS_ON_ONEDNN
from benchmarks.conv_cases import Case
from benchmarks.options import Effort, Options

DEPTHWISE = Case((20, 20), 2, 48, 48, 3, groups=48, padding=1)
GROUPED = Case((20, 20), 2, 48, 48, 3, groups=24, padding=1)


@pytest.fixture
def rates(monkeypatch):
    """GFLOP/s of multiply-adds and of matrix products; memory that takes no time."""
    found = {"fma_gflops": 10.0, "matmul_gflops": 1e4}
    monkeypatch.setattr(compare, "fma_gflops", lambda: found["fma_gflops"])
    monkeypatch.setattr(compare, "matmul_gflops", lambda dtype, precision: found["matmul_gflops"])
    for module in (compare, roofline):
        monkeypatch.setattr(module, "memory_gbps", lambda: 1e9)
    return found


def _rows(case, *contenders):
    return conv.measure([case], Options(Effort(1, 0), frozenset(contenders)))["rows"]


@pytest.mark.parametrize(("case", "rate"), [(DEPTHWISE, "fma_gflops"), (GROUPED, "matmul_gflops")])
def test_the_roofline_counts_depthwise_convolutions_in_multiply_adds(rates, case, rate):
    for row in _rows(case):
        assert {name for name in row if name.endswith("_gflops")} == {rate}
        assert row["floor_ms"] == round(case.flops / rates[rate] / 1e6, 6)
        assert row["is_product"] == (rate == "matmul_gflops")


def test_each_factor_of_the_rate_is_a_multiplication():
    x = jnp.ones((1 << 12,))
    text = jax.jit(roofline.products_in_turn).lower(x, x).compile().as_text()
    assert len(re.findall(r" multiply\(", text)) == roofline._FACTORS


def test_a_cpu_multiplies_and_adds_as_in_matrix_products(monkeypatch):
    """In the same call of `matmul_gflops` as for other rows, whose result is cached."""
    monkeypatch.setattr(roofline, "matmul_gflops", lambda *args: {("float32", None): 7.0}[args])
    assert roofline.fma_gflops.__wrapped__() == 7.0


def test_onednn_is_a_contender_of_other_kernels_on_a_cpu(rates):
    for row in _rows(DEPTHWISE, OURS_ON_ONEDNN, OURS_ON_CUDNN):
        assert set(row["times_ms"]) == {OURS, OURS_ON_ONEDNN}, row["measure"]
    for row in _rows(GROUPED, OURS_ON_ONEDNN):
        assert set(row["times_ms"]) == {OURS}, row["measure"]  # the same program
    for row in _rows(dataclasses.replace(DEPTHWISE, stride=2), OURS_ON_ONEDNN):  # jaxgrad has one pass on oneDNN
        assert (OURS_ON_ONEDNN in row["times_ms"]) == (row["measure"] != "dX"), row["measure"]
