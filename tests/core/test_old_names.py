"""Names of implementations that work for one release: what they run, and their warnings."""

from __future__ import annotations

import json
import re
import warnings
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from recorded_calls import random_array, recorded_calls

import jaxgrad
from jaxgrad import Tuning
from jaxgrad._src.choice.environment import current_environment
from jaxgrad._src.choice.measured_choices import Choice
from jaxgrad._src.choice.op import OPS
from jaxgrad._src.choice.selection import select

_X, _W, _DEPTHWISE = random_array(2, 6, 9, 7), random_array(6, 6, 3, 3), random_array(6, 1, 3, 3)
_RENAMED = "implementation='depthwise' is now called 'cpu'"
_CHANGES = "in the next release 'cpu' means jaxgrad's own kernels alone; 'onednn' forces oneDNN"
# An old name, the weights of a call, what runs it today, and the warning.
_CASES = [
    ("depthwise", _DEPTHWISE, "cpu", _RENAMED),
    ("cpu", _W, "onednn", _CHANGES),
    ("cpu", _DEPTHWISE, "cpu", ""),
    ("onednn", _DEPTHWISE, "onednn", ""),
]


def _warnings(function):
    """The result of a function, and the texts of its warnings of deprecation, which point at this file."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        found = function()
    ours = [each for each in caught if "jaxgrad" in str(each.message)]
    assert {(each.category, each.filename) for each in ours} <= {(DeprecationWarning, __file__)}
    return found, [str(each.message) for each in ours]


def _handlers(function, *arrays):
    """The handlers that a program calls, by their libraries, and the warnings."""
    text, found = _warnings(lambda: jax.jit(function).trace(*arrays).lower(lowering_platforms=("cpu",)).as_text())
    libraries = {"cpu_depthwise": "cpu", "onednn_conv": "onednn"}
    return {libraries[name] for name in re.findall(r"@jaxgrad_(cpu_depthwise|onednn_conv)_", text)}, found


def _settings(w):
    return {"window_strides": (1, 1), "padding": "SAME", "feature_group_count": 6 // w.shape[1]}


def _loss(op, w, **settings):
    return lambda x, w: jnp.sum(jnp.sin(op(x, w, **_settings(w), **settings)))


@pytest.mark.parametrize(("name", "w", "runs", "warning"), _CASES)
def test_an_op(name, w, runs, warning):
    gradient = jax.grad(_loss(jaxgrad.conv_general_dilated, w, implementation=name), (0, 1))
    found, caught = _handlers(gradient, _X, w)
    assert found == {runs}
    assert len(caught) == bool(warning)
    assert warning in "".join(caught)


@pytest.mark.parametrize(("name", "w", "runs", "warning"), _CASES)
def test_an_accelerated_function(name, w, runs, warning):
    gradient = jax.grad(jaxgrad.accelerate(_loss(lax.conv_general_dilated, w), implementation=name), (0, 1))
    found, caught = _handlers(gradient, _X, w)
    assert found == {runs}
    assert len(caught) == bool(warning)
    assert warning in "".join(caught)
    report, caught = _warnings(lambda: jaxgrad.report(gradient, _X, w, platform="cpu"))
    assert set(report.counts) == {runs}
    assert warning in "".join(caught)


@pytest.mark.parametrize(("name", "w", "runs", "warning"), _CASES)
def test_explain(name, w, runs, warning):
    call = partial(jaxgrad.conv_general_dilated, **_settings(w), implementation=name)
    found, caught = _warnings(lambda: jaxgrad.explain(call, _X, w, platform="cpu"))
    assert (found.implementation, found.reason) == (runs, f"forced by implementation={runs!r}")
    assert warning in "".join(caught)


@pytest.mark.parametrize("name", ["cpu", "depthwise"])
def test_an_error_has_the_name_that_was_given(name):
    integers = jnp.ones((2, 6, 9, 7), jnp.int32), jnp.ones((6, 6, 3, 3), jnp.int32)

    def call():
        with pytest.raises(ValueError, match=f"implementation='{name}' cannot run: "):
            jaxgrad.conv_general_dilated(*integers, (1, 1), "SAME", implementation=name)

    _, caught = _warnings(call)
    assert not caught


def test_no_warning_where_onednn_does_not_run():
    """On another platform, and for a dtype that oneDNN lacks."""
    accelerated = jaxgrad.accelerate(_loss(lax.conv_general_dilated, _W), implementation="cpu")
    _, caught = _warnings(lambda: jax.jit(accelerated).trace(_X, _W).lower(lowering_platforms=("cuda",)))
    assert not caught
    covered = jaxgrad.accelerate(lambda x, w: lax.conv(x, w, (1, 1), "VALID"), implementation="cpu")  # a product on XLA
    _, caught = _warnings(
        lambda: jax.jit(covered).trace(_X[..., :3, :3], _W).lower(lowering_platforms=("cuda",)).as_text()
    )
    assert not caught
    wide = jaxgrad.accelerate(_loss(lax.conv_general_dilated, _W.astype("float64")), implementation="cpu")
    _, caught = _warnings(lambda: jax.jit(wide).lower(_X.astype("float64"), _W.astype("float64")))
    assert not caught


def test_explain_of_a_typical_call():
    found, caught = _warnings(lambda: jaxgrad.explain(jaxgrad.conv_transpose, implementation="cpu", platform="cpu"))
    assert found.implementation == "onednn"
    assert _CHANGES in "".join(caught)


def test_a_call_warns_once():
    def calls():
        for _ in range(3):
            jaxgrad.conv_general_dilated(_X, _W, (1, 1), "SAME", implementation="cpu")

    _, caught = _warnings(calls)
    assert len(caught) == 1


@pytest.mark.parametrize("op", ["batch_norm_training", "gru"])
def test_other_ops_keep_their_names(op):
    jaxgrad.explain(getattr(jaxgrad, op))  # loads it
    _, caught = _warnings(lambda: select(OPS[op], "cpu", known={("cpu", name): None for name in OPS[op].passes}))
    assert not caught
    with pytest.raises(ValueError, match="implementation='depthwise' cannot run: the implementations of this op are"):
        jaxgrad.explain(getattr(jaxgrad, op), implementation="depthwise")


def _old_file(path, times_of_calls):
    """A file of the former format, with the times of calls by their texts. The fastest one is chosen."""
    choices = {}
    for text, times in times_of_calls.items():
        choices[text] = Choice(min(times, key=times.get), "xla", times)
    Tuning({current_environment(): choices}).save(path)
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, "format": 1}))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ({"xla": 2.0, "cpu": 1.0}, {"xla": 2.0, "onednn": 1.0}),
        ({"xla": 3.0, "cpu": 1.0, "depthwise": 2.0}, {"xla": 3.0, "onednn": 1.0, "cpu": 2.0}),
        ({"xla": 3.0, "cpu": 2.0, "depthwise": 1.0}, {"xla": 3.0, "onednn": 2.0, "cpu": 1.0}),
        ({"xla": 3.0, "cpu": 1.0, "onednn": 2.0}, {"xla": 3.0, "cpu": 1.0, "onednn": 2.0}),
    ],
)
def test_a_file_of_a_tuning(tmp_path, old, new):
    """Of the two kernels, "cpu" was the one that is not named."""
    path = tmp_path / "tuning.json"
    of_passes = {name if name == "xla" else f"forward on {name}": us for name, us in old.items()}
    _old_file(path, {"conv forward x": old, "jax.lax x": of_passes, "gru f32": {"cpu": 1.0, "xla": 2.0}})
    tuning, caught = _warnings(lambda: Tuning.load(path))
    assert len(caught) == (new != old)
    assert "save it again" in "".join(caught) or new == old
    conv, equation, gru = tuning.choices.values()
    assert dict(conv.times_us) == new
    assert conv.implementation == min(new, key=new.get)
    assert dict(equation.times_us) == {n if n == "xla" else f"forward on {n}": us for n, us in new.items()}
    assert equation.implementation == f"forward on {conv.implementation}"
    assert (gru.implementation, gru.default) == ("cpu", "xla")
    (tuning | tuning).save(path)
    again, caught = _warnings(lambda: Tuning.load(path))
    assert again == tuning
    assert not caught


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="the choices are of a CPU")
@pytest.mark.parametrize(("name", "runs"), [("cpu", "onednn"), ("depthwise", "cpu")])
def test_a_choice_of_an_old_file_is_followed(tmp_path, name, runs):
    loss = _loss(jaxgrad.conv_general_dilated, _DEPTHWISE)
    times = {"xla": 3.0, "cpu": 2.0, "depthwise": 2.0, name: 1.0}
    _old_file(tmp_path / "tuning.json", dict.fromkeys(recorded_calls(jax.grad(loss), _X, _DEPTHWISE), times))
    tuning, _ = _warnings(lambda: Tuning.load(tmp_path / "tuning.json"))
    with tuning:
        assert _handlers(jax.grad(loss), _X, _DEPTHWISE) == ({runs}, [])
