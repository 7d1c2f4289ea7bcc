"""Short measurements."""

from __future__ import annotations

import pytest

from jaxgrad._src.tuning import timing


@pytest.fixture(autouse=True)
def _few_samples(monkeypatch):
    monkeypatch.setattr(timing, "_ROUNDS", 3)
    monkeypatch.setattr(timing, "_SECONDS", 0)
    monkeypatch.setattr(timing, "_SETTLE_SECONDS", 0)
