"""`jaxgrad.report` and `python -m jaxgrad`: the convolutions of small networks, and what they run on."""

from __future__ import annotations

import dataclasses
import functools
import json
import operator
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from accelerated import convolve, convolve_arrays
from cuda_module import NEEDS_CUDA_MODULE
from flax import nnx
from jax import lax
from mesh_cases import NHWC
from recorded_calls import recorded_calls

import jaxgrad
from jaxgrad._src.choice.environment import current_environment
from jaxgrad._src.choice.measured_choices import Choice

X, W = convolve_arrays()
IMAGES = np.zeros((2, 9, 7, 8), np.float32)


def _rows(function, *args, platform="cpu", **kwargs):
    return jaxgrad.report(function, *args, platform=platform, **kwargs).convolutions


def _check_source(row, comment, function):
    """The row names the line of this file that ends with the comment."""
    lines = Path(__file__).read_text().splitlines()
    (number,) = (i for i, line in enumerate(lines, 1) if line.endswith(f"# {comment}"))
    assert row.source == f"{os.path.relpath(__file__)}:{number} ({function})"


def _network(w, x):
    y = jnp.tanh(lax.conv(x, w, (1, 1), "SAME"))  # first
    for _ in range(3):
        filters = jnp.ones((4, 3, 4, 4), y.dtype)
        z = lax.conv_general_dilated(jnp.moveaxis(y, 1, 3), filters, (2, 1), "VALID", dimension_numbers=NHWC)  # second
        y = y * jnp.sum(z)
    return jnp.sum(y)


def test_rows_of_a_network_with_gradients():
    first, second, *gradients = _rows(jax.grad(jaxgrad.accelerate(_network), (0, 1)), W, X)
    _check_source(first, "first", "_network")
    _check_source(second, "second", "_network")
    assert (first.pass_name, first.implementation, first.reason, first.count) == ("forward", "onednn", "oneDNN", 1)
    assert (first.lhs, first.rhs, first.result) == ("f32[2,3,9,7] NCHW", "f32[4,3,3,3] OIHW", "f32[2,4,9,7] NCHW")
    assert (second.pass_name, second.count) == ("forward", 3)
    assert (second.lhs, second.rhs, second.result) == ("f32[2,9,7,4] NHWC", "f32[4,3,4,4] HWIO", "f32[2,3,5,4] NHWC")
    assert Counter((row.pass_name, row.source, row.count) for row in gradients) == {
        ("input_gradient", first.source, 1): 1,
        ("weight_gradient", first.source, 1): 1,
        ("input_gradient", second.source, 3): 1,
    }


def test_the_printed_table():
    report = jaxgrad.report(jax.grad(jaxgrad.accelerate(_network), (0, 1)), W, X, platform="cpu")
    header, *rows, total, summary, _ = str(report).splitlines()
    assert header.split() == ["layer", "op", "passes", "runs", "on", "MFLOP", "why"]
    assert [row.split("  ")[0] for row in rows] == [layer.source for layer in report.layers]
    assert "forward, weight_gradient, input_gradient" in rows[0]
    assert "3 forward, 3 input_gradient" in rows[1]
    assert len({row.index("conv") for row in rows}) == 1
    assert total == "9 calls in 2 layers on cpu, 0 calls on XLA"
    assert summary == report.summary
    assert report.counts == {"onednn": 9}
    left = jaxgrad.report(_network, W, X, platform="cpu")
    assert str(left).splitlines()[-3] == "4 calls in 2 layers on cpu, 4 calls on XLA"
    header, *rows = report.details().splitlines()
    assert header.split() == ["source", "op", "shapes", "pass", "runs", "on", "count", "repeats", "MFLOP", "why"]
    assert len(rows) == len(report.convolutions) == 5
    assert "f32[2,3,9,7] NCHW, f32[4,3,3,3] OIHW -> f32[2,4,9,7] NCHW" in rows[0]


def test_unmarked_and_switched_off_convolutions():
    (unmarked,) = _rows(convolve, X, W)
    (off,) = _rows(jaxgrad.accelerate(convolve, implementation="xla"), X, W)
    (direct,) = _rows(functools.partial(jaxgrad.conv_general_dilated, implementation="xla"), X, W, (1, 1), "SAME")
    (inside,) = _rows(jaxgrad.accelerate(lambda x, w: direct_call(x, w)), X, W)
    assert {row.implementation for row in (unmarked, off, direct, inside)} == {"xla"}
    assert {row.pass_name for row in (unmarked, off, direct, inside)} == {""}
    assert unmarked.reason == "not accelerated"
    assert off.reason == "acceleration is switched off"
    assert direct.reason == inside.reason == "selected by the op of jaxgrad"


def direct_call(x, w):
    """Has a convolution that jaxgrad itself writes."""
    return jaxgrad.conv_general_dilated(x, w, (1, 1), "SAME", implementation="xla")


def test_reasons():
    """One convolution for each kind of answer."""

    def reason(function, *shapes, dtype="float32", implementation=None, platform="cpu"):
        arrays = [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]
        (row,) = _rows(jaxgrad.accelerate(function, implementation=implementation), *arrays, platform=platform)
        return row.implementation, row.reason

    x, w = X.shape, W.shape
    assert reason(convolve, x, w) == ("onednn", "oneDNN")
    assert reason(convolve, x, w, implementation="onednn") == ("onednn", "oneDNN")
    depthwise = functools.partial(
        lax.conv_general_dilated, window_strides=(1, 1), padding="SAME", feature_group_count=3
    )
    assert reason(depthwise, x, (3, 1, 3, 3), implementation="cpu")[0] == "cpu"
    assert reason(convolve, x, w, dtype="int32") == ("xla", "the dtype int32 runs on XLA")
    assert "oneDNN has no float64" in reason(convolve, x, w, dtype="float64")[1]
    assert "multiplications" in reason(convolve, (1, 1, 3, 3), (1, 1, 3, 3))[1]
    assert reason(convolve, (1, 1, 3, 3), (1, 1, 3, 3), implementation="onednn")[0] == "onednn"
    found = reason(lambda x, w: lax.conv(x, w, (1, 1), "VALID"), x, (4, 3, 9, 7))
    assert found[0] == "xla"
    assert "matrix product" in found[1]
    everything = {"window_strides": (2, 2), "lhs_dilation": (2, 2), "rhs_dilation": (2, 1)}
    dilated = functools.partial(lax.conv_general_dilated, padding=((1, 1), (1, 1)), **everything)
    assert reason(dilated, x, w)[1] == "no pass computes a convolution with these strides and dilations"
    assert reason(convolve, x, w, implementation="cudnn")[0] == "xla"
    assert "only the implementation 'cudnn' may run here" in reason(convolve, x, w, implementation="cudnn")[1]
    assert reason(convolve, x, w, implementation="onednn", platform="gpu")[0] == "xla"


def test_an_op_that_forces_a_kernel_of_another_platform():
    def forced(x, w):
        return jaxgrad.conv_general_dilated(x, w, (1, 1), "SAME", implementation="onednn")

    (here,), (there,) = _rows(forced, X, W, platform="cpu"), _rows(forced, X, W, platform="gpu")
    assert (here.implementation, here.reason) == ("onednn", "selected by the op of jaxgrad")
    assert there.reason == "implementation='onednn' of the op raises ValueError on this platform"


def test_another_platform():
    """The platform need not be that of this machine. By default it is that of JAX's default device."""
    gradient = jax.grad(jaxgrad.accelerate(_network), (0, 1))
    for platform in ("cpu", "gpu"):
        report = jaxgrad.report(gradient, W, X, platform=platform)
        assert report.platform == platform
        assert sum(report.counts.values()) == 9
        assert all(row.reason for row in report.convolutions)
        assert ("onednn" in report.counts) == (platform == "cpu")
    assert jaxgrad.report(gradient, W, X).platform == ("gpu" if jax.default_backend() == "gpu" else "cpu")
    assert jaxgrad.report(gradient, W, X, platform="cuda") == jaxgrad.report(gradient, W, X, platform="gpu")
    with pytest.raises(ValueError, match=r"jaxgrad.report: platform must be .*, got 'tpu'"):
        jaxgrad.report(gradient, W, X, platform="tpu")


def test_a_convolution_that_a_tuning_leaves_on_xla_keeps_its_pass():
    function, arrays = jaxgrad.accelerate(jax.grad(lambda w, x: jnp.sum(jnp.sin(convolve(x, w))))), (W, X)
    passes = [row.pass_name for row in _rows(function, *arrays)]
    assert "weight_gradient" in passes
    times = {"xla": 1.0, "forward on cpu": 2.0}
    choices = {text: Choice("xla", "forward on cpu", times) for text in recorded_calls(function, *arrays)}
    with jaxgrad.Tuning({current_environment(): choices}):
        rows = _rows(function, *arrays)
    assert {row.implementation for row in rows} == {"xla"}
    assert [row.pass_name for row in rows] == passes


def test_arguments():
    """Static arguments, keywords, shapes instead of arrays, scalars, and a function under `jax.jit`."""

    @jaxgrad.accelerate
    @functools.partial(jax.jit, static_argnames=("count", "name"))
    def repeated(x, w, scale, *, count, name="SAME"):
        for _ in range(count):
            x = x + scale * convolve(x, jnp.tile(w, (1, 1, 1, 1))[:3])
        return x

    shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (X, W)]
    for arrays in ((X, W), shapes):
        (row,) = _rows(repeated, *arrays, 2.0, count=2, name="other")
        assert (row.count, row.implementation) == (2, "onednn")
        (row,) = _rows(lambda *arrays: repeated(*arrays, 0.5, count=3), *arrays)
        assert (row.count, row.implementation) == (3, "onednn")
    assert _rows(lambda x: 2 * x, X) == ()
    assert str(jaxgrad.report(lambda x: 2 * x, X, platform="cpu")).splitlines()[0].startswith("0 calls in 0 layers")


def test_nothing_runs_and_nothing_is_compiled():
    events = Counter()

    def listen(event, *_, **__):
        events[event] += 1

    jax.monitoring.register_event_duration_secs_listener(listen)
    jaxgrad.report(jax.grad(jaxgrad.accelerate(_network), (0, 1)), W, X)
    assert not [event for event in events if "backend_compile" in event]


def test_loops_and_branches_count_once():
    def function(x, w):
        def step(carry, _):
            return carry + convolve(x, w), None

        y, _ = lax.scan(step, convolve(x, w), None, length=5)
        return lax.cond(jnp.sum(y) > 0, lambda: convolve(x, w), lambda: y)

    rows = _rows(jaxgrad.accelerate(function), X, W)
    assert sum(row.count for row in rows) == 3
    assert {row.implementation for row in rows} == {"onednn"}


def test_layers_of_frameworks_name_the_line_of_the_caller():
    """Not the line inside the framework; through modules that are arguments with leaves that are no arrays."""

    class Model(nnx.Module):
        def __init__(self):
            self.conv = nnx.Conv(8, 6, (3, 3), rngs=nnx.Rngs(0))

        def __call__(self, x):
            return self.conv(x)  # nnx

    class Linen(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Conv(6, (3, 3))(x)  # linen

    layer = eqx.nn.Conv2d(8, 6, 3, key=jax.random.key(0), dtype=jnp.float32)

    def equinox(layer, x):
        return jax.vmap(layer)(x)  # equinox

    hk = pytest.importorskip("haiku")

    def haiku(x):
        return hk.Conv2D(6, 3)(x)  # haiku

    transformed = hk.without_apply_rng(hk.transform(haiku))
    linen = Linen()
    for apply, params, x, name, function in (
        (lambda model, x: model(x), Model(), IMAGES, "nnx", "__call__"),
        (linen.apply, linen.init(jax.random.key(0), IMAGES), IMAGES, "linen", "__call__"),
        (equinox, layer, np.moveaxis(IMAGES, 3, 1), "equinox", "equinox"),
        (transformed.apply, transformed.init(jax.random.key(0), IMAGES), IMAGES, "haiku", "haiku"),
    ):
        accelerated = jaxgrad.accelerate(apply)

        def gradient(params, x, accelerated=accelerated):
            return jax.tree.leaves(eqx.filter_grad(lambda params: jnp.sum(accelerated(params, x) ** 2))(params))

        rows = _rows(gradient, params, x)
        assert [row.pass_name for row in rows] == ["forward", "weight_gradient"]
        for row in rows:
            _check_source(row, name, function)


class _Normalized(nnx.Module):
    """Its calls change running statistics."""

    def __init__(self):
        self.conv = nnx.Conv(8, 6, (3, 3), rngs=nnx.Rngs(0))
        self.norm = nnx.BatchNorm(6, rngs=nnx.Rngs(0))

    @jaxgrad.accelerate
    def __call__(self, x):
        return self.norm(self.conv(x))

    around, inside = jaxgrad.accelerate(nnx.jit(__call__)), nnx.jit(jaxgrad.accelerate(__call__))

    def scaled(self, x, scale):
        return scale * self(x)


@pytest.mark.parametrize(
    "function_of",
    [
        lambda model: model,
        jaxgrad.accelerate,
        *map(operator.attrgetter, ("__call__", "around", "inside")),
        lambda model: functools.partial(model.scaled, scale=2.0),
    ],
    ids=["model", "accelerated", "method", "around", "inside", "partial"],
)
def test_a_model_with_state_stays_as_it_is(function_of):
    """The model is the function, or the object of a method: it is traced as an argument."""
    model = _Normalized()
    state = jax.tree.map(jnp.copy, nnx.state(model))
    (row,) = _rows(function_of(model), IMAGES)
    assert (row.pass_name, row.implementation) == ("forward", "onednn")
    assert jaxgrad.tune(function_of(model), IMAGES, progress=False).choices
    jax.tree.map(np.testing.assert_array_equal, nnx.state(model), state)
    assert model(IMAGES).shape == (2, 9, 7, 6)


def test_bound_values_are_constant():
    """Arrays that `functools.partial` binds may be sizes, as of padding."""
    bound = functools.partial(
        jaxgrad.conv_general_dilated, window_strides=np.array([2, 1]), padding=np.array([[1, 0], [0, 2]])
    )
    (row,) = _rows(bound, X, W)
    assert (row.pass_name, row.implementation) == ("forward", "onednn")
    by_position = functools.partial(jaxgrad.conv_general_dilated, X, W, np.array([2, 1]))
    assert jaxgrad.tune(by_position, "SAME", progress=False).choices


def test_a_report_is_data():
    report = jaxgrad.report(jaxgrad.accelerate(_network), W, X, platform="cpu")
    restored = json.loads(json.dumps(dataclasses.asdict(report)))
    assert restored["platform"] == "cpu"
    assert [jaxgrad.Convolution(**row) for row in restored["convolutions"]] == list(report.convolutions)
    assert jaxgrad.Report("cpu", report.convolutions) == report


def test_diagnosis_has_a_line_on_accelerate():
    done = subprocess.run([sys.executable, "-P", "-m", "jaxgrad"], capture_output=True, text=True, check=True)
    assert f"accelerate    available on jax {jax.__version__}" in done.stdout.splitlines()


_DEPTHWISE = """
import json
import jax, jax.numpy as jnp
from jax import lax
import jaxgrad
from jaxgrad._src.native import cuda

cuda.gpu_ordinal = lambda: 0

def loss(x, w):
    y = lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"),
                                 feature_group_count=32)
    return jnp.sum(jnp.sin(y))

arrays = [jax.ShapeDtypeStruct(shape, "float32") for shape in ((8, 28, 28, 32), (7, 7, 1, 32))]
gradient = jax.grad(jaxgrad.accelerate(loss), (0, 1))
rows = {p: [(row.pass_name, row.implementation, row.reason)
            for row in jaxgrad.report(gradient, *arrays, platform=p).convolutions] for p in ("cpu", "gpu")}
texts = {p: jax.jit(gradient).trace(*arrays).lower(lowering_platforms=(p,)).as_text() for p in ("cpu", "cuda")}
print(json.dumps([rows, texts]))
"""


@NEEDS_CUDA_MODULE
def test_depthwise_convolutions_name_their_kernels(on_fake_cuda):
    """On a CPU, and with the fake driver of a GPU."""
    rows, texts = on_fake_cuda(_DEPTHWISE)
    names = {"forward", "input_gradient", "weight_gradient"}
    for platform, implementation in (("cpu", "cpu"), ("gpu", "cuda")):
        assert {name for name, _, _ in rows[platform]} == names
        assert {tuple(why) for _, *why in rows[platform]} == {(implementation, "jaxgrad's own kernel")}
    for platform, text in texts.items():
        assert set(re.findall(rf"@jaxgrad_{platform}_depthwise_(\w+)", text)) == names


@pytest.mark.parametrize("in_axes", [(0, 0), (0, None), (None, 0)])
def test_operations_of_independent_problems(in_axes):
    """Of an op. An operand that all problems share has no axis of problems."""
    x, w = (jax.ShapeDtypeStruct(shape, "float32") for shape in ((4, 3, 8), (3, 1, 3)))

    def op(x, w):
        return jaxgrad.conv_general_dilated(x, w, (1,), "SAME", feature_group_count=3)

    given = [
        array if axis is None else jax.ShapeDtypeStruct((5, *array.shape), array.dtype)
        for array, axis in zip((x, w), in_axes, strict=True)
    ]
    found = jaxgrad.report(jax.vmap(op, in_axes), *given, platform="cpu")
    assert found.flops == 5 * jaxgrad.report(op, x, w, platform="cpu").flops


@NEEDS_CUDA_MODULE
def test_the_reason_of_products_of_independent_problems():
    x, w = (jax.ShapeDtypeStruct(shape, "float32") for shape in ((9, 4, 32, 8, 8), (9, 32, 32, 3, 3)))

    @jaxgrad.accelerate
    @jax.vmap
    def gradient(x, w):
        return jax.grad(lambda w: jnp.sum(lax.conv(x, w, (1, 1), "SAME") ** 2))(w)

    reasons = {c.reason for c in jaxgrad.report(gradient, x, w, platform="gpu").convolutions}
    assert (
        "XLA is faster for several independent problems; XLA runs matrix products of the independent problems"
        in reasons
    )


def test_a_pass_that_vmap_moves_to_another_kernel():
    """The report names the kernel that runs the sizes that `vmap` has made."""
    x, w = (jax.ShapeDtypeStruct(shape, "float32") for shape in ((16, 1, 28, 28, 384), (3, 3, 1, 384)))
    layout = ("NHWC", "HWIO", "NHWC")

    def op(x, w):
        return jaxgrad.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=layout, feature_group_count=384)

    mapped = jax.vmap(op, (0, None))
    (call,) = jaxgrad.report(mapped, x, w, platform="cpu").convolutions
    text = jax.jit(mapped).trace(x, w).lower(lowering_platforms=("cpu",)).as_text()
    handlers = {"cpu": "jaxgrad_cpu_depthwise_forward", "onednn": "jaxgrad_onednn_conv_forward"}
    assert handlers[call.implementation] in text
