"""The selection of cases with all pairs of parameters."""

from __future__ import annotations

import itertools

from pairwise import distinct_parameters, each_value, pairwise


def test_all_pairs_in_few_cases():
    cases = [*itertools.product("abcd", (1, 2, 3), (False, True), "xy")]
    cases.remove(("b", 2, True, "x"))  # a case that does not exist
    selected = [cases[i] for i in pairwise(cases)]
    assert 12 <= len(selected) <= 14
    for i, j in itertools.combinations(range(4), 2):
        assert {(case[i], case[j]) for case in selected} == {(case[i], case[j]) for case in cases}


def test_each_value_in_few_cases():
    cases = [("a", 1, "x"), ("a", 2, "x"), ("b", 1, "y"), ("b", 2, "y"), ("b", 3, "y")]
    assert each_value(cases) == {0, 3, 4}
    assert each_value([*itertools.product("abcd", "xy")]) == {0, 3, 4, 7}  # x and y in turn
    assert each_value([("a",), ("b",)]) == {0, 1}
    assert each_value([(), ()]) == {0, 1}


def test_cases_without_a_third_parameter_all_stay():
    assert pairwise([*itertools.product("abc", "xy")]) == {*range(6)}
    assert pairwise([("a",), ("b",)]) == {0, 1}
    assert pairwise([(), ()]) == {0, 1}
    assert pairwise([]) == set()


def test_parameters_that_change_together_count_once():
    cases = [("on", shape, axis, dtype) for shape, axis in ((3, 0), (4, 1)) for dtype in "fb"]
    assert distinct_parameters(cases) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert distinct_parameters([("on",), ("on",)]) == [(), ()]
