"""`python -m benchmarks tuned`: the wrong table, and the contenders that it is in force for."""

from __future__ import annotations

import argparse
import contextlib
from functools import partial

import benchmarks_package  # noqa: F401
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import compare, preference_calls, preferences, timing, tuned
from benchmarks.options import Effort, Options
from jaxgrad._src.choice import table
from jaxgrad._src.choice.measured_choices import Choice
from jaxgrad._src.tuning import api


def test_the_wrong_table_has_another_choice_for_every_call():
    """XLA in place of a kernel, and a kernel in place of XLA."""
    calls = {
        (each.pass_name, text): preferences._features(each, "cpu")
        for text, each in preference_calls.calls("cpu").items()
        if text.startswith("conv ")
    }
    names = "cpu", "onednn", "xla"

    def choices():
        return {key: table.preference("conv", key[0], "cpu", calls[key], names).prefer for key in calls}

    right = choices()
    with tuned._wrong_table():
        wrong = choices()
    assert len(right) > 150
    assert set(right.values()) == set(names)
    assert wrong == {key: "onednn" if choice == "xla" else "xla" for key, choice in right.items()}
    assert choices() == right


def test_a_step_is_lowered_in_its_context():
    factor = [1.0]

    @contextlib.contextmanager
    def tripled():
        factor[0] = 3.0
        yield
        factor[0] = 1.0

    steps = {name: lambda state: (state * factor[0], state) for name in ("plain", "tripled")}
    in_force = {"plain": contextlib.nullcontext, "tripled": tripled}
    plain, changed = timing.raised(timing.jax_loop_contenders(steps, jnp.ones(3), in_force=in_force))
    np.testing.assert_array_equal(plain.outputs[0], np.ones(3))
    np.testing.assert_array_equal(changed.outputs[0], 3 * np.ones(3))


def test_the_step_of_jax_lax_is_compiled_first(capsys):
    """It leaves the most to XLA's autotuner, which then knows the operations of the others."""
    factors = {"jaxgrad": 1.0, "jax.lax": 2.0, "other": 3.0}
    steps = {name: partial(lambda factor, state: (state * factor, state), factor) for name, factor in factors.items()}
    found = timing.raised(timing.jax_loop_contenders(steps, jnp.ones(3)))
    lines = capsys.readouterr().out.splitlines()
    assert next(line for line in lines if "compiled" in line).startswith("  jax.lax: compiled")
    assert [each.name for each in found] == list(factors)
    for each, factor in zip(found, factors.values(), strict=True):
        np.testing.assert_array_equal(each.outputs[0], factor * np.ones(3))


_CALLS = [case for case in tuned.QUICK_CASES if isinstance(case, tuned.CallCase)]


@pytest.mark.parametrize("case", _CALLS, ids=lambda case: case.op)
def test_a_call_has_the_gradients_of_all_operands(case):
    function, args, _ = tuned._function(case)
    operands = jax.tree.leaves(args[0])
    results = jax.tree.leaves(jax.eval_shape(function, *args))
    assert [each.shape for each in results[-len(operands) :]] == [each.shape for each in operands]


def test_a_call_is_measured_under_the_wrong_table(monkeypatch):
    monkeypatch.setattr(compare, "matmul_gflops", lambda *_: 1.0)
    monkeypatch.setattr(compare, "memory_gbps", lambda: 1.0)
    monkeypatch.setattr(
        api, "measured_choice", lambda *_: Choice("onednn", "xla", {"onednn": 1.0, "xla": 2.0}, "2026-01-02")
    )
    case, names = _CALLS[0], ("jaxgrad, wrong table", "jaxgrad, wrong table, tuned")
    (row,) = tuned.measure([case], Options(Effort(1, 0), frozenset(names)))["rows"]
    assert row["label"] == case.label
    assert tuple(row["times_ms"]) == ("jaxgrad", *names)
    wrong, recovered = (row["temporary_bytes"][name] for name in names)
    assert wrong > recovered == row["temporary_bytes"]["jaxgrad"]


@pytest.mark.parametrize("text", ["conv", "gru:", "gru:1,2", "step:1,2,3,4", ""])
def test_cases_that_are_no_call(text):
    with pytest.raises(argparse.ArgumentTypeError, match="must be"):
        tuned.parse_case(text)


def test_a_case_is_that_of_its_benchmark():
    assert tuned.parse_case("gru:100,32,64,128") in tuned.CASES["cpu"]
