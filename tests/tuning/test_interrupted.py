"""`jaxgrad.tune` that an error or an interrupt ends: the exception carries what was measured until then."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from recorded_calls import random_array

import jaxgrad
from jaxgrad._src.choice.measured_choices import Choice
from jaxgrad._src.tuning import api

pytestmark = pytest.mark.jax_version

_ARRAYS = random_array(4, 3, 3, 2), random_array(2, 6, 9, 7)
_CHOICE = Choice("xla", "cpu", {"xla": 1.0, "cpu": 2.0})


def _loss(w, x):
    return jnp.sum(jnp.sin(jaxgrad.conv_general_dilated(x, w, (2, 1), "SAME", feature_group_count=2)))


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
@pytest.mark.parametrize("measured", [0, 1, 2])
def test_what_was_measured_is_kept(monkeypatch, error, measured):
    """Also where the function itself fails, which is timed after the calls."""
    calls = []

    def choice(*_):
        calls.append(1)
        if len(calls) > measured:
            raise error
        return _CHOICE

    def fails(*_):
        raise error

    monkeypatch.setattr(api, "measured_choice", choice)
    monkeypatch.setattr(api, "run_once", fails)
    with pytest.raises(error) as raised:
        jaxgrad.tune(jax.grad(_loss), *_ARRAYS)
    tuning = raised.value.tuning
    assert list(tuning.choices.values()) == [_CHOICE] * measured
    assert isinstance(tuning, jaxgrad.Tuning)
    expected = (
        f"jaxgrad.tune has measured {measured} of 2 calls: the attribute `tuning` of this exception has the choices."
    )
    assert raised.value.__notes__ == [expected]
    assert jaxgrad.config.current().tuning is None


def test_an_error_before_the_measurements_carries_nothing():
    def function(w):
        raise ValueError("of the function")

    with pytest.raises(ValueError, match="of the function") as raised:
        jaxgrad.tune(function, _ARRAYS[0])
    assert not hasattr(raised.value, "tuning")
