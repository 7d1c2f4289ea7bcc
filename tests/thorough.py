"""Which parameters of a test are thorough: left out unless they are asked for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest


def beyond(count: int, values: Sequence[Any]) -> list[Any]:
    """The values of one parameter, of which those after the first `count` are thorough."""
    return [*values[:count], *(pytest.param(value, marks=pytest.mark.thorough) for value in values[count:])]
