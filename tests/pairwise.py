"""Selects cases of a test with several parameters so that every two values of two parameters occur together.

Most faults show with one value or with two values together. A test with three or more parameters therefore runs few
of its cases by default: those of `pairwise`. The others are marked `thorough`. The parameters alone decide which.
With the oldest JAX, CI runs fewer cases, those of `each_value`: what differs between releases depends on one value.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Hashable, Sequence

Case = tuple[Hashable, ...]


def pairwise(cases: Sequence[Case]) -> set[int]:
    """Returns the indices of few cases that have all pairs of values of all cases; all indices without a pair.

    Args:
      cases: for each case the values of its parameters. All cases have the same number of parameters.
    """
    return _covering(cases, 2)


def each_value(cases: Sequence[Case]) -> set[int]:
    """Returns the indices of few cases that have all values of all cases; all indices without a second parameter."""
    return _covering(cases, 1)


def _covering(cases: Sequence[Case], size: int) -> set[int]:
    """The next case is always the first of those with the most sets of `size` values that no selected case has.

    For `size` 1, it is the one of these whose values the selected cases have least, so that these use all values alike.
    """
    if not cases or len(cases[0]) < 2:
        return {*range(len(cases))}
    missing = [{*itertools.combinations(enumerate(case), size)} for case in cases]
    selected, used = set(), Counter()
    while any(missing):
        index = max(
            range(len(cases)), key=lambda i: (len(missing[i]), -sum(used[value] for value in enumerate(cases[i])))
        )
        selected.add(index)
        used.update(enumerate(cases[index]) if size == 1 else ())
        covered = frozenset(missing[index])
        missing = [sets - covered for sets in missing]
    return selected


def distinct_parameters(cases: Sequence[Sequence[Hashable]]) -> list[Case]:
    """Returns the cases without the parameters that never change, or that change along with an earlier one."""
    columns = {}
    for column in zip(*cases, strict=True):
        numbers = {value: number for number, value in enumerate(dict.fromkeys(column))}
        if len(numbers) > 1:
            columns[tuple(numbers[value] for value in column)] = None
    return [*zip(*columns, strict=True)] if columns else [()] * len(cases)
