"""`jaxgrad.Tuning`: what it does where it is in force, files, and machines."""

from __future__ import annotations

import copy
import dataclasses
import errno
import functools
import json
import os
import pickle
import re
import warnings
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from accelerated import convolve, convolve_arrays, passes
from recorded_calls import random_array, recorded_calls
from tolerances import assert_close

import jaxgrad
from jaxgrad import Tuning
from jaxgrad._src.choice import environment
from jaxgrad._src.choice.environment import current_environment
from jaxgrad._src.choice.measured_choices import Choice, Recorder
from jaxgrad._src.choice.selection import select
from jaxgrad._src.gru import api
from jaxgrad._src.gru import cpu as gru_cpu
from jaxgrad._src.gru import cuda as gru_cuda
from jaxgrad._src.norm import cpu as norm_cpu
from jaxgrad._src.norm import cuda as norm_cuda

pytestmark = pytest.mark.jax_version

OWN = "onednn" if jax.default_backend() == "cpu" else "cudnn"
# The backend of the platform for an op, and the targets of the custom calls in its forward and backward pass.
if OWN == "onednn":
    BATCH_NORM_KERNELS = (
        norm_cpu.CpuBackend,
        {f"jaxgrad_cpu_norm_{name}" for name in ("forward", "backward")},
    )
    GRU_KERNELS = gru_cpu.CpuBackend, {"jaxgrad_cpu_gru_forward", "jaxgrad_cpu_gru_backward"}
else:
    BATCH_NORM_KERNELS = (
        norm_cuda.CudaBackend,
        {f"jaxgrad_cuda_norm_{name}" for name in ("forward", "backward")},
    )
    GRU_KERNELS = gru_cuda.CudaBackend, {"jaxgrad_cuda_gru_forward", "jaxgrad_cuda_gru_backward"}
_X, _W = random_array(2, 6, 9, 7), random_array(4, 3, 3, 2)


def _assert_close(found, expected):
    assert_close(found, expected, dtype="float32", terms=100)


def _conv(x, w):
    """With groups and a stride: by default oneDNN runs it on a CPU."""
    return jaxgrad.conv_general_dilated(x, w, (2, 1), "SAME", feature_group_count=2)


def _tuning(function, *args, implementation, other="xla"):
    """A tuning that chooses an implementation for all calls of a function."""
    times = {implementation: 1.0, other: 2.0}
    choices = {text: Choice(implementation, other, times) for text in recorded_calls(function, *args)}
    return Tuning({current_environment(): choices})


def _both_gradients(x, w):
    return jax.grad(lambda x, w: jnp.sum(jnp.sin(_conv(x, w))), (0, 1))(x, w)


def _explained(platform=None):
    return jaxgrad.explain(_conv_op, _X, _W, (2, 1), "SAME", feature_group_count=2, platform=platform)


_conv_op = jaxgrad.conv_general_dilated


@pytest.mark.parametrize("implementation", ["xla", OWN])
def test_a_choice_is_followed(implementation):
    tuning = _tuning(
        _both_gradients, _X, _W, implementation=implementation, other=OWN if implementation == "xla" else "xla"
    )
    assert len(tuning.choices) == 3
    step = jax.jit(_both_gradients)
    expected = step(_X, _W)
    with tuning:
        explained = _explained()
        found, program = step(_X, _W), step.lower(_X, _W)
    assert explained.implementation == implementation
    assert "chosen by jaxgrad.tune" in explained.reason
    assert ("xla" in passes(program)) == (implementation == "xla")
    jax.tree.map(_assert_close, found, expected)
    assert "measured" not in _explained().reason


def test_a_choice_for_another_platform_is_not_followed():
    other = "gpu" if OWN == "onednn" else "cpu"
    before = _explained(other)
    with _tuning(_conv, _X, _W, implementation="xla", other=OWN):
        assert _explained(other) == before


def test_other_shapes_and_forced_calls_are_left_alone():
    with _tuning(_conv, _X, _W, implementation="xla", other=OWN):
        assert _explained().implementation == "xla"
        before = jaxgrad.explain(_conv_op, _X[:1], _W, (2, 1), "SAME", feature_group_count=2)
        assert "measured" not in before.reason
        forced = jaxgrad.explain(_conv_op, _X, _W, (2, 1), "SAME", feature_group_count=2, implementation=OWN)
    assert forced.implementation == OWN


def test_update_and_nested_blocks():
    slow = _tuning(_conv, _X, _W, implementation="xla", other=OWN)
    fast = _tuning(_conv, _X, _W, implementation=OWN)
    try:
        jaxgrad.config.update(tuning=slow)
        assert jaxgrad.config.current().tuning is slow
        assert _explained().implementation == "xla"
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(_explained).result().implementation == "xla"
            with fast, fast:
                assert _explained().implementation == OWN
                assert pool.submit(_explained).result().implementation == "xla"
            assert _explained().implementation == "xla"
    finally:
        jaxgrad.config.update(tuning=None)
    assert "measured" not in _explained().reason


@pytest.mark.parametrize("name", ["xla", f"forward on {OWN}", f"input_gradient on {OWN}"])
def test_a_choice_for_an_accelerated_convolution(name):
    arrays = convolve_arrays()
    accelerated = jaxgrad.accelerate(convolve)
    expected = jax.jit(convolve)(*arrays)
    with _tuning(accelerated, *arrays, implementation=name, other="another"):
        (row,) = jaxgrad.report(accelerated, *arrays).convolutions
        program = jax.jit(accelerated).lower(*arrays)
        y = jax.jit(accelerated)(*arrays)
    assert row.implementation == name.split()[-1]
    assert "chosen by jaxgrad.tune" in row.reason
    assert list(passes(program)) == [name.split()[0]]
    _assert_close(y, expected)


def test_a_choice_under_vmap():
    """It is for the sizes that vmap makes, and not for those of one example."""
    x = jnp.stack([_X, _X + 1])

    def mapped(x, w):
        return jax.vmap(_conv, (0, None))(x, w)

    with _tuning(_conv, _X, _W, implementation="xla", other=OWN):
        one = passes(jax.jit(mapped).lower(x, _W))
    with _tuning(mapped, x, _W, implementation="xla", other=OWN):
        many = passes(jax.jit(mapped).lower(x, _W))
    assert set(many) == {"xla"}
    if OWN == "onednn":
        assert set(one) == {"xla"}  # the selection of the call comes first, and vmap takes nothing up again
    with _tuning(mapped, x, _W, implementation=OWN):
        assert set(passes(jax.jit(mapped).lower(x, _W))) == {"forward"}
        _assert_close(jax.jit(mapped)(x, _W)[1], _conv(x[1], _W))


def test_files(tmp_path):
    tuning = _tuning(_both_gradients, _X, _W, implementation="xla", other=OWN)
    tuning.save(tmp_path / "tuning.json")
    loaded = Tuning.load(tmp_path / "tuning.json")
    assert loaded == tuning
    assert hash(loaded) == hash(tuning)
    assert repr(loaded) == repr(tuning)
    assert loaded.choices == tuning.choices
    assert loaded != _tuning(_conv, _X, _W, implementation="xla", other=OWN)
    assert str(loaded) == str(tuning)
    first, header, *rows = str(tuning).splitlines()
    assert f"jax {jax.__version__}" in first
    assert header.split() == ["call", "choice", "gain", "microseconds"]
    assert len(rows) == 3
    assert all("2.00x" in row for row in rows)


def test_the_date_of_a_choice(tmp_path):
    """It is kept in files, where it may be missing, and does not make choices differ."""
    path, plain = tmp_path / "tuning.json", _tuning(_conv, _X, _W, implementation="xla", other=OWN)
    dated = {text: dataclasses.replace(choice, date="2026-01-02") for text, choice in plain.choices.items()}
    tuning = Tuning({current_environment(): dated})
    assert tuning == plain
    assert repr(tuning) == repr(plain)
    tuning.save(path)
    assert {choice.date for choice in Tuning.load(path).choices.values()} == {"2026-01-02"}
    path.write_text(re.sub(r',\s*"date": "[\d-]+"', "", path.read_text()))
    assert {choice.date for choice in Tuning.load(path).choices.values()} == {""}


def test_merged():
    old = _tuning(_both_gradients, _X, _W, implementation="xla", other=OWN)
    new = _tuning(_conv, _X, _W, implementation=OWN)
    elsewhere = Tuning({dataclasses.replace(current_environment(), driver="1.2"): dict(old.choices)})
    merged = old | new | elsewhere
    assert len(merged.choices) == 3
    assert merged.choices == {**old.choices, **new.choices}
    assert len(merged.machines) == 2
    assert [choice.implementation for choice in merged.choices.values()].count(OWN) == 1
    assert merged | Tuning({}) == merged
    with pytest.raises(TypeError, match="unsupported operand"):
        merged | 3


@pytest.mark.parametrize(
    ("part", "changed"),
    [
        ("{", ""),
        ('"format": 2', '"format": 3'),
        ('"machines"', '"computers"'),
        ('"jaxlib"', '"xla"'),
        ("1.0", '"fast"'),
        ("1.0", "0.0"),
        ("1.0", "NaN"),
        ("{", "\N{LATIN SMALL LETTER E WITH ACUTE}"),
        ("{", "[" * 100_000),
        ('"implementation": "xla"', '"implementation": "metal"'),
        ('"times_us": {', '"times_us": [{'),
        ("1.0", "1" + 400 * "0"),
        ("1.0", "Infinity"),
        ("1.0", "true"),
        ('"default": "', '"default": 5, "no": "'),
        ('"date": "', '"date": 5, "no": "'),
        ('"jaxlib": "', '"jaxlib": 5, "no": "'),
        ('"choices": {', '"choices": [], "no": {'),
        ('"machines": [', '"machines": {}, "no": ['),
    ],
)
def test_a_file_that_is_no_tuning(tmp_path, part, changed):
    path = tmp_path / "tuning.json"
    _tuning(_conv, _X, _W, implementation="xla", other=OWN).save(path)
    content = path.read_text()
    assert part in content
    path.write_text(content.replace(part, changed, 1), encoding="latin-1")
    with pytest.raises(ValueError, match=r"jaxgrad.Tuning.load: .*tuning.json' is no tuning: "):
        Tuning.load(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[]", "it has no 'format' where one must be"),
        ('{"format": 2}', "it has no 'machines' where one must be"),
        ('{"format": true, "machines": []}', "its format is True, and this jaxgrad reads 1 and 2"),
        ('{"format": 2, "machines": {}}', "'machines' must be of type list, got dict"),
    ],
)
def test_what_a_file_lacks(tmp_path, content, message):
    path = tmp_path / "tuning.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=f"is no tuning: {message}$"):
        Tuning.load(path)


def test_a_tuning_has_a_mapping():
    with pytest.raises(TypeError, match=r"jaxgrad.Tuning: machines must be a mapping, got int"):
        Tuning(3)


def test_a_file_has_each_machine_once(tmp_path):
    path = tmp_path / "tuning.json"
    _tuning(_conv, _X, _W, implementation="xla", other=OWN).save(path)
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, "machines": 2 * content["machines"]}))
    with pytest.raises(ValueError, match="it has this machine twice: "):
        Tuning.load(path)


@pytest.mark.parametrize("path", [5, None, b"a.json"])
def test_a_path_of_another_type(path):
    for method in (Tuning.load, Tuning({}).save):
        with pytest.raises(TypeError, match=rf"jaxgrad.Tuning.\w+: path must be .*, got {type(path).__name__}"):
            method(path)


@pytest.mark.skipif(OWN != "onednn", reason="these settings matter on a GPU")
def test_settings_of_cudnn_do_not_matter_on_a_cpu():
    with _tuning(_conv, _X, _W, implementation="xla", other=OWN):
        expected = _explained()
        with jaxgrad.config.override(search="heuristic", deterministic=True, workspace_limit=0):
            assert _explained() == expected
    assert expected.implementation == "xla"


def test_an_override_of_other_settings_keeps_the_tuning():
    """That of the place where its block is entered."""
    tuning, older = _tuning(_conv, _X, _W, implementation="xla", other=OWN), jaxgrad.config.override(search="fallback")
    with tuning, older as settings:
        assert settings == jaxgrad.config.current()
        assert (settings.tuning, settings.search) == (tuning, "fallback")
        assert jaxgrad.config.override(search="fallback") == older
        with jaxgrad.config.override(tuning=None), pickle.loads(pickle.dumps(older)) as inner:
            assert inner.tuning is None


def test_a_file_is_replaced_as_a_whole(tmp_path, monkeypatch):
    """Through a link too. Where the text cannot be written, such as on a full disk, the old file stays."""
    path, link = tmp_path / "tuning.json", tmp_path / "link.json"
    tuning = _tuning(_conv, _X, _W, implementation="xla", other=OWN)
    Tuning({}).save(path)
    link.symlink_to(path)
    tuning.save(link)
    assert link.is_symlink()
    assert Tuning.load(path) == tuning

    def fails(*_):
        raise OSError(errno.ENOSPC, "no space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", fails)
        with pytest.raises(OSError, match="no space"):
            Tuning({}).save(path)
    assert Tuning.load(path) == tuning
    assert sorted(each.name for each in tmp_path.iterdir()) == ["link.json", "tuning.json"]
    with pytest.raises(FileNotFoundError) as raised:
        Tuning({}).save(tmp_path / "nowhere" / "tuning.json")
    assert raised.value.filename == str(tmp_path / "nowhere" / "tuning.json")


def test_a_missing_file(tmp_path):
    with pytest.raises(FileNotFoundError):
        Tuning.load(tmp_path / "tuning.json")


@pytest.mark.parametrize("field", ["device_kind", "jax", "jaxlib", "jaxgrad", "library", "driver"])
def test_another_machine_has_no_effect_but_one_warning(recwarn, field):
    other = dataclasses.replace(current_environment(), **{field: "another"})
    tuning = Tuning({other: dict(_tuning(_conv, _X, _W, implementation="xla", other=OWN).choices)})
    before = _explained()
    warnings.simplefilter("always")  # otherwise Python shows a warning of a line once
    with tuning:
        assert not tuning.choices
        for _ in range(2):
            assert _explained() == before
    (warning,) = [w for w in recwarn if "tuning" in str(w.message)]
    assert str(warning.message).startswith("the tuning has no effect here, because it was measured with ")
    assert f"{field} 'another'" in str(warning.message)
    assert warning.filename == __file__


def test_the_environment_on_a_gpu_names_the_loaded_cudnn(monkeypatch):
    """cuDNN is loaded at the first question for it: a process that has asked for nothing yet has the same key."""
    loaded = {"cudnn": ""}
    device = SimpleNamespace(platform="gpu", device_kind="a GPU")
    monkeypatch.setattr(environment.jax, "local_devices", lambda: [device])
    monkeypatch.setattr(environment.cuda, "build_info", lambda: loaded)
    monkeypatch.setattr(environment.cuda, "cudnn_unavailable", lambda: loaded.update(cudnn="9.1.2") or "")
    found = current_environment.__wrapped__()
    assert (found.platform, found.device_kind, found.library) == ("cuda", "a GPU", "cuDNN 9.1.2")


@pytest.mark.parametrize("machines", [{}, {dataclasses.replace(current_environment(), jax="0"): {}}])
def test_a_tuning_without_choices_changes_nothing(machines):
    """Forward mode and typical calls are as without it."""
    x, w = jnp.ones((1, 1, 5), jnp.float32), jnp.ones((1, 1, 3), jnp.float32)

    def convolution(x):
        return jaxgrad.conv_general_dilated(x, w, (1,), "SAME")

    def forward_mode():
        try:
            return str(jax.make_jaxpr(lambda x: jax.jvp(convolution, (x,), (x,)))(x))
        except TypeError as error:
            return str(error)

    def typical():
        return [jaxgrad.explain(op) for op in (_conv_op, jaxgrad.batch_norm_training, jaxgrad.gru)]

    expected = forward_mode(), typical()
    with warnings.catch_warnings(), Tuning(machines):
        warnings.simplefilter("ignore", RuntimeWarning)
        assert (forward_mode(), typical()) == expected


def test_an_op_whose_calls_have_no_text_is_not_tuned():
    """As the op in docs/contributing.md, which passes its operand as the description of a call."""
    with _tuning(_conv, _X, _W, implementation="xla", other=OWN):
        call = SimpleNamespace(T=1, B=2, H=3, dtype=np.dtype(np.float32), linear_before_reset=False)  # no text
        candidates = select(api.OP, None, call).candidates
    assert {one.tuning for one in candidates.values()} == {None}


def test_a_tuning_can_be_copied_and_pickled():
    tuning = _tuning(_both_gradients, _X, _W, implementation="xla", other=OWN)
    assert pickle.loads(pickle.dumps(tuning)) == tuning == copy.deepcopy(tuning)
    assert Tuning({}) != Recorder()


_X_OF_BATCH_NORM, _X_OF_GRU = random_array(64, 32), random_array(20, 4, 8)


@pytest.mark.parametrize("followed", ["own", "xla"])
@pytest.mark.parametrize(
    ("op", "backend", "targets", "arrays", "optional"),
    [
        (
            jaxgrad.batch_norm_training,
            *BATCH_NORM_KERNELS,
            (_X_OF_BATCH_NORM, random_array(32), random_array(32)),
            {"residual": _X_OF_BATCH_NORM, "activation": "relu"},
        ),
        (
            jaxgrad.gru,
            *GRU_KERNELS,
            (_X_OF_GRU, random_array(1, 96, 8), random_array(1, 96, 32)),
            {"sequence_lens": [20, 3, 7, 9], "reset": jnp.zeros((20, 4), bool)},
        ),
    ],
)
def test_a_choice_is_followed_in_calls_with_optional_arrays(
    monkeypatch, op, backend, targets, arrays, optional, followed
):
    """In the selection, which `jaxgrad.explain` shows, and in both passes, against the preference."""

    def gradient(x):
        return jax.grad(lambda x: jnp.sum(jnp.sin(op(x, *arrays[1:], **optional)[0])))(x)

    own = backend.implementation
    implementation, default = (own, "xla") if followed == "own" else ("xla", own)
    monkeypatch.setattr(backend, "why_slower", lambda *_, **__: "" if default == own else "a wrong preference")
    assert jaxgrad.explain(op, *arrays, **optional).implementation == default
    with _tuning(gradient, arrays[0], implementation=implementation, other=default) as tuning:
        assert len(tuning.choices) == 1
        explained = jaxgrad.explain(op, *arrays, **optional)
        program = jax.jit(gradient).lower(arrays[0]).as_text()
    assert explained.implementation == implementation
    assert "chosen by jaxgrad.tune" in explained.reason
    assert set(re.findall(r"@(jaxgrad_\w+)", program)) == (targets if followed == "own" else set())


def test_explain_names_the_choice_of_a_call_with_bias_and_relu():
    settings = {"feature_group_count": 2, "activation": "relu"}
    bias = jnp.ones(4, jnp.float32)

    def call(x, w, bias):
        return jnp.sum(jaxgrad.conv_general_dilated(x, w, (2, 1), "SAME", bias=bias, **settings))

    gradients = jax.grad(call, (0, 1, 2))
    with _tuning(gradients, _X, _W, bias, implementation="xla", other=OWN):
        explained = jaxgrad.explain(_conv_op, _X, _W, (2, 1), "SAME", bias=bias, **settings)
        found = passes(jax.jit(gradients).lower(_X, _W, bias))
    assert set(found) == {"xla"}
    assert explained.implementation == "xla"
    assert "chosen by jaxgrad.tune" in explained.reason
    for one_pass in explained.passes:
        assert one_pass.implementation == "xla"
        assert "chosen by jaxgrad.tune" in one_pass.reason
    # On a GPU, where XLA runs the weight gradient of this call as a convolution, the passes are explained alike.
    products = [] if jax.default_backend() == "gpu" else [0, 0, 1]
    assert [one_pass.reason.count("each tap of the window") for one_pass in explained.passes] == products


@pytest.mark.parametrize("decorated", [lambda f: f, jax.jit, functools.partial], ids=["plain", "jit", "partial"])
def test_explain_is_under_the_overrides_that_decorate_the_op(decorated):
    """The innermost of them holds."""
    settings = {"window_strides": (2, 1), "padding": "SAME", "feature_group_count": 2}
    op = functools.partial(jaxgrad.conv_general_dilated, **settings)
    with _tuning(_conv, _X, _W, implementation="xla", other=OWN) as tuning:
        expected = jaxgrad.explain(op, _X, _W)
    assert expected.passes[0].implementation == "xla"
    with_tuning, without = (jaxgrad.config.override(tuning=each) for each in (tuning, None))
    assert jaxgrad.explain(with_tuning(decorated(op)), _X, _W) == expected
    assert jaxgrad.explain(without(decorated(with_tuning(op))), _X, _W) == expected
    assert jaxgrad.explain(with_tuning(decorated(without(op))), _X, _W) == jaxgrad.explain(op, _X, _W) != expected
