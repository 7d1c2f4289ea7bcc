"""The matrix product in the benchmarks of convolutions: the same results as the passes, and one column of its own."""

from __future__ import annotations

import benchmarks_package  # noqa: F401
import jax
import numpy as np
import pytest

from benchmarks import compare, conv, matrix_product, report, tables
from benchmarks.contender_names import LAX, MATRIX_PRODUCT, OURS, TORCH_EAGER
from benchmarks.conv_cases import Case
from benchmarks.options import Effort, Options
from benchmarks.timing import Contender

PATCHES = (
    Case((8, 12), 2, 3, 5, 4, stride=4),
    Case((8, 12), 2, 6, 10, 4, stride=4, groups=2),
    Case((8, 12), 2, 6, 10, 4, stride=4, groups=2, channels_last=False),
    Case((3, 4), 2, 6, 5, 4, stride=4, transposed=True),
    Case((3, 4), 2, 6, 5, 4, stride=4, transposed=True, channels_last=False),
    Case((6, 8, 4), 2, 3, 5, 2, stride=2, channels_last=False),
    Case((12,), 2, 3, 5, 2, stride=2, dtype="bfloat16"),
)
OTHERS = (
    Case((8, 12), 2, 3, 5, 4, stride=2),
    Case((9, 12), 2, 3, 5, 4, stride=4),
    Case((8, 12), 2, 3, 5, 4, stride=4, padding=2),
    Case((9, 9), 2, 3, 5, 3, stride=3, dilation=2),
    Case((8, 12), 2, 3, 5, 1),
    Case((8, 12), 2, 6, 6, 4, stride=4, groups=6),
)


def _contenders(monkeypatch, case, *names):
    """The contenders of each pass, without timing."""
    found = {}

    def kept(work, contenders, effort):
        found[work.measure] = work, contenders
        return {}

    monkeypatch.setattr(conv, "compare", kept)
    conv.measure([case], Options(Effort(1, 0), frozenset(names)))
    return found


@pytest.mark.parametrize("case", PATCHES, ids=lambda case: case.label)
def test_it_computes_each_pass(monkeypatch, case):
    found = _contenders(monkeypatch, case, MATRIX_PRODUCT)
    assert list(found) == ["forward", "dX", "dW"]
    for work, (ours, product) in found.values():
        assert (ours.name, product.name) == (OURS, MATRIX_PRODUCT)
        compare.check_agreement(work, ours, product, [1e-2 if case.dtype == "bfloat16" else 1e-5])


@pytest.mark.parametrize("case", PATCHES, ids=lambda case: case.label)
def test_it_is_one_product_and_nothing_else(case):
    arrays = conv.make_arrays(case)
    for each in matrix_product.products(case, *arrays).values():
        with jax.default_matmul_precision("high"):  # as a setting of the convolutions that it stands beside
            (equation,) = jax.make_jaxpr(each.function)(*each.operands).eqns
        assert equation.primitive.name == "dot_general"
        assert 2 * np.prod(equation.outvars[0].aval.shape) * _summed(equation) == case.flops
        assert {operand.dtype for operand in each.operands} == {arrays[0].dtype}
        assert equation.outvars[0].aval.dtype == arrays[0].dtype
        assert equation.params["precision"] == (jax.lax.Precision.HIGH,) * 2


def _summed(equation):
    ((axes, _), _), (operand, _) = equation.params["dimension_numbers"], equation.invars
    return np.prod([operand.aval.shape[axis] for axis in axes])


@pytest.mark.parametrize("case", OTHERS, ids=lambda case: case.label)
def test_other_convolutions_have_none(monkeypatch, case):
    for _, contenders in _contenders(monkeypatch, case, MATRIX_PRODUCT).values():
        assert [each.name for each in contenders] == [OURS]


def test_it_is_measured_unless_other_contenders_are_requested(monkeypatch):
    for _, contenders in _contenders(monkeypatch, PATCHES[0], LAX).values():
        assert [each.name for each in contenders] == [OURS, LAX]
    assert MATRIX_PRODUCT in conv.CONTENDERS
    assert any(map(matrix_product.has_product, conv.QUICK_CASES))
    assert all(any(map(matrix_product.has_product, cases)) for cases in conv.CASES.values())


def test_results_of_other_shapes_do_not_agree():
    """Also where they would broadcast."""
    ours, other = (Contender(name, float, [np.ones(shape)]) for name, shape in ((OURS, (3, 3)), (LAX, (3, 1))))
    with pytest.raises(RuntimeError, match=r"'jaxgrad' has the shape \(3, 3\), that of 'jax.lax' \(3, 1\)"):
        compare.check_agreement(conv.work_of(PATCHES[0], "dX"), ours, other)


def _row(label, measure, **others):
    """A row in which jaxgrad takes 2 ms."""
    names = {"product": MATRIX_PRODUCT, "lax": LAX, "torch": TORCH_EAGER}
    times = {names[name]: ms for name, ms in others.items()}
    return {
        "label": label,
        "measure": measure,
        "dtype": "bfloat16",
        "flops": 1,
        "extra": False,
        "settings": {"groups": 1, "features": 3},
        "times_ms": {name: {"median": ms} for name, ms in {OURS: 2.0, **times}.items()},
        "times_slower_than_jaxgrad": {name: ms / 2 for name, ms in times.items()},
    }


_ENVIRONMENT = {"gpu": "NVIDIA H100", "platform": "gpu", "date": "2026-01-02", "versions": {"jax": "0.11"}}


def _report(rows):
    return {"op": "conv", "environment": _ENVIRONMENT, "left_out": {}, "one_line_a_case": True, "rows": rows}


def test_the_table_has_a_column_for_it(tmp_path):
    """It does not count in speed-ups, also where it is the fastest. Other cases have an empty cell."""
    rows = [
        _row("patches", "forward", lax=10.0, torch=6.0, product=1.6),
        _row("patches", "dX", lax=4.0, product=2.5),
        _row("patches", "dW", lax=3.0),
        *(_row("other", measure, lax=8.0, torch=2.0) for measure in ("forward", "dX", "dW")),
    ]
    path = report.save(_report(rows), tmp_path)
    header, patches, other = tables.lines(report.load(path), rows)
    column = "matrix product (ms, jaxgrad / matrix product)"
    assert dict(zip(header, patches, strict=True)) == {
        "case": "patches",
        "forward": "2.00 (5.0x, 3.0x)",
        "input gradient": "2.00 (2.0x, -)",
        "weight gradient": "2.00 (1.50x, -)",
        column: "1.60 / 2.50 / - (1.25x / 0.80x / -)",
    }
    assert dict(zip(header, other, strict=True))[column] == ""
    with_unknown = {**rows[0], "times_ms": {"unknown": {}, **rows[0]["times_ms"]}}
    assert report.contenders(_report([with_unknown])) == [OURS, LAX, TORCH_EAGER, MATRIX_PRODUCT, "unknown"]


def test_a_table_without_it():
    rows = [_row("other", measure, lax=8.0, torch=2.0) for measure in ("forward", "dX", "dW")]
    assert tables.lines(_report(rows), rows)[0] == ["case", "forward", "input gradient", "weight gradient"]
    assert "matrix product" not in tables.text(_report(rows))


@pytest.mark.parametrize(
    ("runs", "expected"),
    [(None, 2 / 3), ({OURS: 1, MATRIX_PRODUCT: 1, LAX: 0}, 2 / 3), ({OURS: 1, MATRIX_PRODUCT: 0}, 1 / 1.25)],
)
def test_the_ratio_is_exact_within_one_run(runs, expected):
    """Of several runs, the report has the ratio of the times of one run."""
    row = _row("patches", "forward", lax=10.0, product=3.0)
    row["times_slower_than_jaxgrad"][MATRIX_PRODUCT] = 1.25
    assert report.over(row if runs is None else {**row, "runs": runs}, MATRIX_PRODUCT) == expected


def test_how_jaxgrad_compares_with_it_over_all_cases():
    """With cases that the table on the page leaves out."""
    rows = [
        _row("a", "forward", lax=10.0, product=1.0),
        {**_row("b", "forward", lax=10.0, product=4.0), "extra": True},
        _row("c", "forward", lax=1.0),
    ]
    (fact,) = [fact for fact in tables.facts(_report(rows)) if "matrix product" in fact]
    expected = "geometric means over 2 cases: forward 1.00x, at most 2.0x (a)."
    assert fact == f"Time of jaxgrad over that of the matrix product, {expected}"


@pytest.mark.parametrize(("lax", "shown"), [(1.7, True), (1.9, False)])
def test_a_case_in_which_jaxgrad_is_slower_is_shown(lax, shown):
    """jaxgrad takes 2 ms. Other extra cases are only counted."""
    rows = [_row("a", "forward", lax=10.0), {**_row("b", "forward", lax=lax), "extra": True}]
    text = tables.markdown(_report(rows))
    assert ("| b |" in text) == shown
    assert ("Not in this table: 1 cases" in text) != shown


def test_how_depthwise_convolutions_compare_with_the_roofline():
    depthwise = {"settings": {"groups": 8, "features": 8}}
    rows = [
        {**_row("a", "forward", lax=10.0), **depthwise, "jaxgrad_over_floor": 2.0},
        {**_row("b", "forward", lax=10.0), **depthwise, "jaxgrad_over_floor": 8.0, "extra": True},
        {**_row("c", "forward", lax=10.0), "jaxgrad_over_floor": 100.0},
        {**_row("d", "forward", lax=10.0), "settings": {"groups": 2, "features": 8}, "jaxgrad_over_floor": 100.0},
    ]
    (fact,) = [fact for fact in tables.facts(_report(rows)) if "roofline" in fact]
    expected = "geometric means over 2 cases: forward 4.0x, at most 8.0x (b)."
    assert fact == f"Depthwise, time of jaxgrad over the roofline, {expected}"
