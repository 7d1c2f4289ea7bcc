"""Programs depend on the choices of a tuning, and not the times behind them."""

from __future__ import annotations

import dataclasses

import jax
import pytest
from recorded_calls import random_array, recorded_calls

import jaxgrad
from jaxgrad import Tuning
from jaxgrad._src.choice.environment import current_environment
from jaxgrad._src.choice.measured_choices import Choice
from jaxgrad._src.run.named_jit import named_jit

pytestmark = pytest.mark.jax_version

_ARRAYS = random_array(2, 6, 9, 7), random_array(4, 3, 3, 2)


def _conv(x, w):
    return jaxgrad.conv_general_dilated(x, w, (2, 1), "SAME", feature_group_count=2)


def _tuning(choice, **environment):
    calls = recorded_calls(_conv, *_ARRAYS)
    return Tuning({dataclasses.replace(current_environment(), **environment): dict.fromkeys(calls, choice)})


_CHOICE = Choice("xla", "cpu", {"xla": 1.0, "cpu": 2.0})


@pytest.mark.parametrize("changes", [{"times_us": {"xla": 1.5, "cpu": 9.0, "onednn": 3.0}}, {"default": "xla"}])
def test_the_same_choices_make_the_same_program(changes):
    traced = []

    @jax.jit
    def step(x, w):
        traced.append(1)
        return _conv(x, w)

    first, second = _tuning(_CHOICE), _tuning(dataclasses.replace(_CHOICE, **changes))
    texts = []
    for tuning in (first, second):
        with tuning:
            texts.append(step.lower(*_ARRAYS).as_text())
    assert texts[0] == texts[1]
    assert len(traced) == 1
    assert first == second
    assert (hash(first), repr(first)) == (hash(second), repr(second))
    assert first.choices != second.choices


def test_a_call_that_no_tuning_affects_is_the_same_program():
    def forced(x, w):
        return jaxgrad.conv_general_dilated(x, w, (2, 1), "SAME", feature_group_count=2, implementation="xla")

    expected = jax.jit(forced).lower(*_ARRAYS).as_text()
    with _tuning(_CHOICE):
        assert jax.jit(forced).lower(*_ARRAYS).as_text() == expected


def test_another_choice_makes_another_program():
    other = _tuning(dataclasses.replace(_CHOICE, implementation="cpu"))
    assert _tuning(_CHOICE) != other
    assert repr(_tuning(_CHOICE)) != repr(other)
    assert _tuning(_CHOICE) != _tuning(_CHOICE, driver="another")


def test_the_equation_of_a_pass_carries_its_parameters():
    passes = [named_jit(lambda x: x, "conv_forward", "parameters") for _ in range(2)]
    names = [jax.make_jaxpr(jax.vmap(each))(_ARRAYS[0]).eqns[0].params["name"] for each in passes]
    assert names[0] == names[1] == passes[0].__name__
    assert [name.identity for name in names] == [("conv_forward", ("parameters",))] * 2
