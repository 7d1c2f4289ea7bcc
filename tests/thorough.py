"""Marks some parameters of a test as thorough: deselected unless `-m` requests them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest


def thorough_after(count: int, values: Sequence[Any]) -> list[Any]:
    """The values of one parameter; those after the first `count` are marked `thorough`."""
    return [*values[:count], *(pytest.param(value, marks=pytest.mark.thorough) for value in values[count:])]
