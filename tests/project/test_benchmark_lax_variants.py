"""The contenders of jax.lax with the best flags of XLA, and with lax.pad in place of an input dilation."""

from __future__ import annotations

import benchmarks_package  # noqa: F401
import jax
import numpy as np
import pytest

from benchmarks import compare, conv, lax_variants, report, steps, tables
from benchmarks.contender_names import BEST_FLAGS, LAX, LAX_DILATED, LAX_FLAGS, OURS
from benchmarks.conv_cases import Case
from benchmarks.networks import NETWORKS
from benchmarks.networks.initial import describe
from benchmarks.options import Effort, Options

TRANSPOSED = (
    Case((5, 7), 2, 4, 6, 4, stride=2, padding=1, transposed=True),
    Case((5,), 2, 4, 6, 3, stride=2, transposed=True, channels_last=False),
    Case((3, 4), 2, 6, 5, 2, stride=2, padding=1, transposed=True),  # cuts the result
)
_ON_CPU = jax.default_backend() == "cpu"


def _times(case, *names):
    """The contenders that are measured, by pass. Measuring compares their results."""
    rows = conv.measure([case], Options(Effort(1, 0), frozenset(names)))["rows"]
    return {row["measure"]: list(row["times_ms"]) for row in rows}


@pytest.fixture(autouse=True)
def _rates(monkeypatch):
    for name in ("matmul_gflops", "memory_gbps", "fma_gflops"):
        monkeypatch.setattr(compare, name, lambda *_: 1.0)


@pytest.mark.parametrize("case", TRANSPOSED, ids=lambda case: case.label)
def test_no_convolution_dilates_its_input(case):
    assert _times(case, LAX, LAX_DILATED) == {which: [OURS, LAX, LAX_DILATED] for which in ("forward", "dX", "dW")}
    function, arrays = conv.passes(jax.lax.conv_transpose, case)["forward"], conv.make_arrays(case)
    with lax_variants.context_of(LAX_DILATED)():
        dilated = jax.jit(function).lower(*arrays)
    usual = jax.jit(function).lower(*arrays)
    assert ("lhs_dilate = [2" in usual.as_text(), "lhs_dilate = [2" in dilated.as_text()) == (True, False)
    np.testing.assert_allclose(dilated.compile()(*arrays), usual.compile()(*arrays), rtol=1e-5, atol=1e-5)


def test_only_transposed_convolutions_have_it():
    for case in (Case((8, 8), 2, 4, 4, 3, stride=2), Case((5,), 2, 4, 6, 3, transposed=True)):
        assert set(_times(case, LAX_DILATED)["forward"]) == {OURS}
    networks = {name for name, each in NETWORKS.items() if name.startswith(("unet", "resnext"))}
    found = {name for name in networks if describe(NETWORKS[name].run, steps.Case(name, 1, 32).x).transposed}
    assert found == {"unet", "unet3d"}


def test_flags_are_of_a_cpu_alone():
    names = (LAX_FLAGS, LAX_DILATED + BEST_FLAGS)
    expected = [OURS, *(names if _ON_CPU else ())]
    assert list(_times(TRANSPOSED[0], *names).values()) == [expected] * 3


@pytest.mark.skipif(not _ON_CPU, reason="the flags are of a CPU")
def test_a_jaxlib_without_a_flag(monkeypatch):
    """The contenders are left out, and the reader sees why."""
    monkeypatch.setattr(lax_variants, "_FLAGS", {"xla_cpu_no_such_flag": True})
    lax_variants._why_not.cache_clear()
    try:
        found = conv.measure([TRANSPOSED[0]], Options(Effort(1, 0), frozenset({LAX, LAX_FLAGS})))
    finally:
        lax_variants._why_not.cache_clear()
    assert set(found["rows"][0]["times_ms"]) == {OURS, LAX}
    (fact,) = (fact for fact in tables.facts(found) if "Left out" in fact)
    assert fact.startswith(f"Left out: {LAX_FLAGS} (this jaxlib lacks a flag: ")
    assert "xla_cpu_no_such_flag" in fact
    assert not any(LAX_FLAGS in fact for fact in report.lacking(found))


def test_a_reader_sees_what_older_rows_lack():
    def row(settings, *names):
        return {"settings": settings, "times_ms": {name: {} for name in (OURS, *names)}}

    rows = [
        row({"transposed": True, "stride": 2}, LAX),
        row({"transposed": False, "stride": 2}, LAX, LAX_FLAGS),
        row({"network": "unet"}, LAX, LAX_FLAGS),
    ]
    on = {
        platform: {"environment": {"platform": platform}, "left_out": {}, "rows": rows} for platform in ("cpu", "gpu")
    }
    flags, dilated, pooled = report.lacking(on["cpu"])
    assert pooled.startswith("In 1 row, max pooling was the maximum of slices in all of JAX")
    assert "was not measured in 1 of 3 rows" in flags
    assert "was not measured in 2 rows" in dilated
    assert "may be many times as fast" in dilated
    of_gpu, of_pooling = report.lacking(on["gpu"])
    assert of_pooling == pooled
    assert of_gpu == "`jax.lax after lax.pad` was not measured in 2 rows with transposed convolutions."
