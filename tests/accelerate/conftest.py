"""Tests that do not name a backend run on the CPU, on a machine with a GPU too."""

from __future__ import annotations

from collections.abc import Iterator

import jax
import pytest


@pytest.fixture(autouse=True)
def _cpu_by_default() -> Iterator[None]:
    with jax.default_device(jax.devices("cpu")[0]):
        yield
