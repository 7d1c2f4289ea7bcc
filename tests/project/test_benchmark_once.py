"""`python -m benchmarks once`: the calls that a profiler sees."""

from __future__ import annotations

import re
import sys
from types import SimpleNamespace

import benchmarks_package  # noqa: F401
import jax
import pytest

from benchmarks import __main__ as command
from benchmarks import conv, gru, once

CONV, GRU, HIGHEST = conv.QUICK_CASES[0], gru.QUICK_CASES[1], gru.Case(5, 2, 3, 4, highest=True)


def _run(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["benchmarks", "once", *arguments])
    command.main()


@pytest.mark.parametrize(
    ("op", "label", "calls"),
    [
        ("conv", CONV.label, ("forward", "dX", "dW")),
        ("gru", GRU.label, ("lbr=0", "lbr=1")),
        ("gru", HIGHEST.label, ("lbr=0", "lbr=1")),
    ],
)
def test_each_call_of_the_matching_cases_runs_once(monkeypatch, capsys, op, label, calls):
    monkeypatch.setattr(conv, "CASES", {jax.default_backend(): conv.QUICK_CASES})
    monkeypatch.setattr(gru, "CASES", {jax.default_backend(): (*gru.QUICK_CASES, HIGHEST)})
    ran, precisions = [], set()

    def jit(function):
        def call(*arrays):
            ran.append(jax.jit(function).lower(*arrays).as_text())
            precisions.add(jax.config.jax_default_matmul_precision)
            return jax.jit(function)(*arrays)

        return call

    names = "default_backend", "default_matmul_precision", "block_until_ready"
    monkeypatch.setattr(once, "jax", SimpleNamespace(jit=jit, **{name: getattr(jax, name) for name in names}))
    _run(monkeypatch, op, f"^{re.escape(label)}$")
    assert capsys.readouterr().out.splitlines() == [f"{label} {call}" for call in calls]
    assert len(ran) == len(calls)
    assert all("jaxgrad" in program for program in ran)
    assert precisions == {"highest" if label == HIGHEST.label else "default"}


def test_errors(monkeypatch, capsys):
    with pytest.raises(SystemExit, match="no case matches no such case"):
        _run(monkeypatch, "gru", "no such case")
    with pytest.raises(SystemExit):
        _run(monkeypatch, "gru", "(")
    assert "must be a regular expression, got (" in capsys.readouterr().err
