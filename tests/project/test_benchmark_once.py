"""`python -m benchmarks.once`: the calls that a profiler sees."""

from __future__ import annotations

import sys

import benchmarks_package  # noqa: F401
import jax
import pytest

from benchmarks import conv, gru, once


def test_every_pass_of_the_matching_cases(monkeypatch, capsys):
    platform = jax.default_backend()
    monkeypatch.setattr(conv, "CASES", {platform: conv.QUICK_CASES})
    monkeypatch.setattr(gru, "CASES", {platform: gru.QUICK_CASES})
    for op, regex, label, calls in (
        ("conv", f"^{conv.QUICK_CASES[0].label}$", conv.QUICK_CASES[0].label, ("forward", "dX", "dW")),
        ("gru", "bidirectional", gru.QUICK_CASES[1].label, ("lbr=0", "lbr=1")),
    ):
        monkeypatch.setattr(sys, "argv", ["once", op, regex])
        once.main()
        assert capsys.readouterr().out.splitlines() == [f"{label} {call}" for call in calls]


def test_no_case_matches(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["once", "gru", "no such case"])
    with pytest.raises(SystemExit, match="no case matches no such case"):
        once.main()
