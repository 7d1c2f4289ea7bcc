"""Marks some parameters of a test: as thorough, deselected unless `-m` requests them, or for the newest JAX alone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pytest


def thorough_after(count: int, values: Sequence[Any], *, several: bool = False) -> list[Any]:
    """The values of one parameter, or tuples of `several`; those after the first `count` are marked `thorough`."""
    later = (value if several else (value,) for value in values[count:])
    return [*values[:count], *(pytest.param(*value, marks=pytest.mark.thorough) for value in later)]


def one_in(count: int, values: Iterable[Any], *, several: bool = False) -> list[Any]:
    """The values of one parameter, or tuples of `several`; only every `count`-th is not marked `thorough`."""
    return [
        value if index % count == 0 else pytest.param(*(value if several else (value,)), marks=pytest.mark.thorough)
        for index, value in enumerate(values)
    ]


def oldest_one_in(count: int, values: Iterable[Any], *, several: bool = False) -> list[Any]:
    """Like `one_in` for CI with the oldest JAX alone: the other values are marked `newest`."""
    return [
        value if index % count == 0 else pytest.param(*(value if several else (value,)), marks=pytest.mark.newest)
        for index, value in enumerate(values)
    ]
