"""Tunings whose choices cannot be followed, as files that were edited, or measured with another library, may have."""

from __future__ import annotations

import json
import pickle
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from accelerated import convolve, convolve_arrays
from recorded_calls import random_array, recorded_calls
from tolerances import assert_close

import jaxgrad
from jaxgrad import Tuning
from jaxgrad._src.choice.environment import current_environment
from jaxgrad._src.choice.measured_choices import Choice

pytestmark = pytest.mark.jax_version

_ARRAYS = {
    "conv_general_dilated": (random_array(2, 6, 9, 7), random_array(4, 3, 3, 2)),
    "conv_transpose": (random_array(2, 6, 9, 7), random_array(4, 3, 3, 2)),
    "batch_norm_training": (random_array(64, 32), random_array(32), random_array(32)),
    "gru": (random_array(5, 2, 3), random_array(1, 12, 3), random_array(1, 12, 4)),
}
_CALLS = {
    "conv_general_dilated": partial(
        jaxgrad.conv_general_dilated, window_strides=(2, 1), padding="SAME", feature_group_count=2
    ),
    "conv_transpose": partial(
        jaxgrad.conv_transpose,
        strides=(2, 1),
        padding="SAME",
        feature_group_count=2,
        dimension_numbers=("NCHW", "OIHW", "NCHW"),
    ),
    "batch_norm_training": jaxgrad.batch_norm_training,
    "gru": jaxgrad.gru,
}
_WITHOUT_KERNEL = ["bogus", *(("cuda", "cudnn") if jax.default_backend() == "cpu" else ("cpu", "onednn"))]


def _tuning(function, *args, implementation):
    choice = Choice(implementation, "xla", {implementation: 1.0, "xla": 2.0})
    return Tuning({current_environment(): dict.fromkeys(recorded_calls(function, *args), choice)})


def _step(op, arrays):
    """The gradients by all arrays, also of several examples."""

    def loss(arrays):
        return sum(jnp.sum(jnp.sin(leaf)) for leaf in jax.tree.leaves(_CALLS[op](*arrays)))

    return jax.grad(loss)(arrays), jax.vmap(jax.grad(loss))(jax.tree.map(lambda a: jnp.stack([a, 2 * a]), arrays))


@pytest.mark.parametrize("op", _CALLS)
def test_a_choice_that_cannot_run_is_as_if_it_were_missing(op):
    arrays = _ARRAYS[op]
    before, expected = jaxgrad.explain(_CALLS[op], *arrays), jax.jit(partial(_step, op))(arrays)
    for implementation in _WITHOUT_KERNEL:
        with _tuning(partial(_step, op), arrays, implementation=implementation):
            explained = jaxgrad.explain(_CALLS[op], *arrays)
            lowered = jax.jit(partial(_step, op)).lower(arrays)
        assert explained.implementation == before.implementation, implementation
        assert f"the tuning chooses {implementation!r}, which " in str(explained)
        assert "chosen by" not in str(explained)
        assert str(explained).startswith(str(before).split(" (")[0])
    found = lowered.compile()(arrays)
    jax.tree.map(partial(assert_close, dtype="float32", terms=1000), found, expected)


@pytest.mark.parametrize("implementation", ["forward on cpu", "forward on bogus", "no_pass on onednn", "bogus"])
def test_a_wrong_choice_for_an_accelerated_convolution(implementation):
    arrays = convolve_arrays()
    accelerated = jaxgrad.accelerate(convolve)
    (before,) = jaxgrad.report(accelerated, *arrays).convolutions
    with _tuning(accelerated, *arrays, implementation=implementation):
        y = jax.jit(accelerated)(*arrays)
        (found,) = jaxgrad.report(accelerated, *arrays).convolutions
    assert (found.pass_name, found.implementation) == (before.pass_name, before.implementation)
    assert found.reason == f"{before.reason}; the tuning chooses {implementation!r}, which cannot run"
    assert_close(y, jax.jit(convolve)(*arrays), dtype="float32", terms=100)


def _file(path, implementation, **environment):
    """A file with a choice of a convolution."""
    _tuning(_CALLS["conv_general_dilated"], *_ARRAYS["conv_general_dilated"], implementation="cudnn").save(path)
    content = json.loads(path.read_text().replace("cudnn", implementation))
    content["machines"][0]["environment"].update(environment)
    path.write_text(json.dumps(content))


@pytest.mark.parametrize("implementation", ["bogus", "forward on cpu", "XLA", ""])
def test_a_file_with_an_unknown_implementation(tmp_path, implementation):
    path = tmp_path / "tuning.json"
    _file(path, implementation)
    with pytest.raises(ValueError, match=rf"is no tuning: the choice of 'conv forward .*: .* {implementation!r}"):
        Tuning.load(path)


def test_a_file_of_another_release_may_have_other_implementations(tmp_path):
    """They have no effect here, and are saved again."""
    path = tmp_path / "tuning.json"
    _file(path, "bogus", jaxgrad="99.0")
    tuning = Tuning.load(path)
    assert not tuning.choices
    assert tuning == pickle.loads(pickle.dumps(tuning))
    tuning.save(path)
    assert "bogus" in path.read_text()


def test_a_file_with_the_choices_of_an_accelerated_convolution(tmp_path):
    path = tmp_path / "tuning.json"
    accelerated = jaxgrad.accelerate(convolve)
    _tuning(accelerated, *convolve_arrays(), implementation="weight_gradient on cpu").save(path)
    assert len(Tuning.load(path).choices) == 1
    path.write_text(path.read_text().replace("weight_gradient on", "gradient on"))
    with pytest.raises(ValueError, match=r"is no tuning: the choice of 'jax.lax .*'gradient on cpu'"):
        Tuning.load(path)
