"""The calls from whose times the tables of preferences are made: those of the benchmark cases, and of other classes."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator
from functools import cache, partial
from typing import Any
from unittest import mock

import jax

import jaxgrad
from benchmarks import conv, gru, norm, per_example
from benchmarks.conv_cases import Case
from jaxgrad._src.choice.candidates import XLA
from jaxgrad._src.choice.measured_choices import Measurable, RecordedCall, Recorder
from jaxgrad._src.choice.op import lowering_platform
from jaxgrad._src.conv.call.params import ConvCall
from jaxgrad._src.conv.measurable import operands, params_of
from jaxgrad._src.conv.on_xla import xla
from jaxgrad._src.conv.on_xla.forms import forms
from jaxgrad._src.native import cuda

# Of classes without a benchmark case.
_OTHER_GPU_CASES = tuple(
    dataclasses.replace(case, dtype=dtype)
    for case in (
        Case((14, 14), 8, 32, 32, 3, padding=1),  # small
        Case((28, 28), 8, 32, 32, 3, stride=2, padding=1),
        Case((28, 28), 64, 192, 192, 3, dilation=2, groups=192, padding=2),
        Case((28, 28), 64, 75, 75, 3, groups=75, padding=1),  # not on jaxgrad's kernel in 16 bits
        Case((28, 28), 64, 256, 256, 3, dilation=2, groups=32, padding=2),
        Case((28, 28), 64, 64, 128, 3, dilation=2, groups=64, padding=2),
        # Patch embeddings: of images in a latent space, and of two images, each with its own.
        Case((56, 56), 64, 96, 384, 4, stride=4),
        Case((224, 224), 4, 16, 768, 16, stride=16, groups=2),
        Case((4096,), 16, 256, 256, 4, causal=True),
        Case((4096,), 16, 256, 256, 4, groups=8, causal=True),
        # The strided layers of 3D encoders, whose windows overlap.
        Case((64, 64, 64), 2, 32, 64, 3, stride=2, padding=1),
        Case((32, 32, 32), 2, 64, 128, 3, stride=2, padding=1),
    )
    for dtype in ("bfloat16", "float32")
)
_OTHER_CPU_CASES = (
    # Several images, each with its own patch embedding.
    *(Case((224, 224), 8, 3 * groups, 768, 16, stride=16, groups=groups) for groups in (2, 4, 8, 32)),
    # Weight gradients that XLA computes in seconds as convolutions.
    *(Case((14, 14), 4, 64, 64, 3, padding=1, groups=groups) for groups in (8, 64)),
    *(Case((8, 8), 32, 256, 512, 8, channels_last=last) for last in (True, False)),
    *(Case((28, 28), 8, 240, 240, 3, dilation=2, groups=240, padding=2, channels_last=last) for last in (True, False)),
    Case((16384,), 2, 64, 64, 3, dilation=2048, groups=64, causal=True, channels_last=False),
)
_CONV_CASES = {"cpu": (*conv.CASES["cpu"], *_OTHER_CPU_CASES), "gpu": (*conv.CASES["gpu"], *_OTHER_GPU_CASES)}
# Weight gradients under `vmap` of x and dy, by the number of independent problems: a few models at once.
_OF_A_FEW_MODELS = (
    (4, Case((8, 8), 4, 32, 32, 3, padding=1)),
    (4, Case((14, 14), 16, 128, 128, 3, padding=1)),
    (4, Case((56, 56), 16, 64, 64, 3, padding=1)),
)
# The same of single small images: per-example gradients.
_OF_EXAMPLES = (
    (300, Case((8, 8), 1, 1, 8, 3, padding=1)),
    (300, Case((8, 8), 1, 4, 8, 3, stride=2, padding=1)),
    (32, Case((16, 16), 1, 1, 8, 3, stride=2, padding=1)),
)
_INDEPENDENT = {
    "cpu": (*_OF_A_FEW_MODELS[:2], *_OF_EXAMPLES),
    "gpu": tuple(
        (problems, dataclasses.replace(case, dtype=dtype))
        for problems, case in _OF_A_FEW_MODELS
        for dtype in ("bfloat16", "float32")
    ),
}
# Batch normalization, the only norm that cuDNN computes.
_BATCH_NORMS = {
    "cpu": (
        *(f"8x{sizes}" for sizes in ("112x112x64", "56x56x64", "28x28x128", "14x14x256", "7x7x512")),
        *("32x8x8x16", "1x8x8x16", "256x512"),
        *("8x64x112x112,feature_axis=1", "8x256x14x14,feature_axis=1"),
        *("8x112x112x64,dtype=bf16", "8x14x14x256,dtype=bf16"),
    ),
    "gpu": (
        *(
            f"{sizes},dtype={dtype}"
            for sizes in (
                *("128x112x112x64", "128x56x56x64", "128x56x56x256", "128x28x28x128", "128x28x28x512"),
                *("128x14x14x256", "128x14x14x1024", "128x7x7x512", "128x7x7x2048"),
                *("32x8x8x16", "8x14x14x256", "256x512", "128x64x56x56,feature_axis=1"),
            )
            for dtype in ("f32", "bf16")
        ),
        *(f"{sizes},activation=relu,dtype=bf16" for sizes in ("128x28x28x128", "8x14x14x256")),
    ),
}


def functions(platform: str) -> Iterator[tuple[Any, list[Any]]]:
    """Functions that make all calls to measure, and the shapes of their arguments."""
    for case in _CONV_CASES[platform]:
        op = jaxgrad.conv_transpose if case.transposed else jaxgrad.conv_general_dilated
        x, w, dy = (jax.ShapeDtypeStruct(shape, case.dtype) for shape in case.shapes())
        yield partial(_gradients, partial(op, **case.settings())), [dy, x, w]
        if platform == "gpu" and not case.transposed and (case.groups == 1 < case.window or not case.extra):
            # A kernel of cuDNN may add the bias and apply relu.
            bias = jax.ShapeDtypeStruct((case.out_features,), case.dtype)
            yield partial(_with_relu, **case.settings()), [x, w, bias]
    for problems, case in _INDEPENDENT[platform]:
        x, w, dy = (jax.ShapeDtypeStruct((problems, *shape), case.dtype) for shape in case.shapes())
        yield jax.vmap(partial(_weight_gradient, partial(jaxgrad.conv_general_dilated, **case.settings()))), [dy, x, w]
    if platform == "gpu":  # many independent problems of one example
        for examples in (per_example.Case(64, 28, 8), per_example.Case(256, 32, 32)):
            arrays = jax.eval_shape(partial(per_example.arrays, examples))
            yield per_example.gradients(jaxgrad.conv_general_dilated), list(arrays)
    for text in _BATCH_NORMS[platform]:
        case = norm.parse_case(f"batch-norm:{text}")
        *inputs, dy = case.operands()
        yield partial(_gradients, case.layer()), [dy, *inputs]

    for case, linear_before_reset in itertools.product(gru.PREFERENCE_CASES[platform], (False, True)):
        inputs, (dy, dy_h) = jax.eval_shape(partial(gru.arrays, case))
        op = partial(jaxgrad.gru, direction=gru.direction(case), linear_before_reset=linear_before_reset)
        yield partial(_gradients, lambda x, w, r, b, h, op=op: op(x, w, r, b, None, h)), [(dy, dy_h), *inputs]


def _with_relu(x: jax.Array, w: jax.Array, bias: jax.Array, **settings: Any) -> jax.Array:
    return jaxgrad.conv_general_dilated(x, w, bias=bias, activation="relu", **settings)


def _gradients(function: Any, dy: Any, *arrays: jax.Array) -> Any:
    y, pullback = jax.vjp(function, *arrays)
    return y, pullback(dy)


def _weight_gradient(function: Any, dy: Any, x: jax.Array, w: jax.Array) -> Any:
    _, pullback = jax.vjp(partial(function, x), w)
    return pullback(dy)


@cache
def calls(platform: str) -> dict[str, RecordedCall]:
    """The calls by their text, recorded without a plan: that takes seconds, where the plans take minutes."""
    return {text: recorded for text, (recorded, _) in _calls_with_functions(platform).items()}


@cache
def _calls_with_functions(platform: str) -> dict[str, tuple[RecordedCall, tuple[Any, list[Any]]]]:
    """The calls with the functions of `functions` that make them."""
    found: dict[str, tuple[RecordedCall, tuple[Any, list[Any]]]] = {}
    with mock.patch.object(cuda, "gpu_ordinal", return_value=None):
        for each in functions(platform):
            for text, recorded in _record(platform, *each).items():
                found.setdefault(text, (recorded, each))
    jax.clear_caches()  # they hold answers for a machine without a GPU
    return found


ON_XLA = " on XLA"  # the end of the text of a call whose forms on XLA are compared
# Of the gradients with groups that are measured on a CPU. As convolutions, they multiply zeros between the elements of
# dy, or all pairs of groups, without fast code: larger ones take minutes, and matrix products less than a second.
_MOST_MULTIPLICATIONS = 1 << 30


@cache
def all_calls(platform: str) -> dict[str, RecordedCall]:
    """`calls`, and by another text the convolutions among them that XLA may run in several forms."""
    found = calls(platform)
    return found | {text + ON_XLA: each for text, each in found.items() if _has_forms_to_measure(each, platform)}


def _has_forms_to_measure(recorded: RecordedCall, platform: str) -> bool:
    call = recorded.call
    if not isinstance(call, ConvCall) or call.has_bias:
        return False
    g = call.problem.geometry
    if platform == "cpu" and g.feature_group_count > 1 and recorded.pass_name != "forward":
        repeated = g.feature_group_count if recorded.pass_name == "weight_gradient" else math.prod(g.window_strides)
        if call.problem.multiplications * repeated > _MOST_MULTIPLICATIONS:
            return False
    return len(forms(recorded.pass_name, call.problem)) > 1


def forms_to_measure(recorded: RecordedCall) -> Measurable:
    """A pass of a convolution on XLA, in all its forms."""
    call = recorded.call
    assert isinstance(call, ConvCall)
    params = params_of(recorded.pass_name, call, XLA)
    run = {
        "forward": lambda x, w, form: xla.forward(params, False, x, w, None, form=form),
        "input_gradient": lambda dy, w, form: xla.input_gradient(params, dy, w, form=form),
        "weight_gradient": lambda x, dy, form: xla.weight_gradient(params, False, x, dy, form=form)[0],
    }[recorded.pass_name]
    functions = {form: partial(run, form=form) for form in forms(recorded.pass_name, call.problem)}
    return Measurable(functions, operands(recorded.pass_name, call))


def with_plan(text: str, platform: str) -> RecordedCall:
    """The call as it is on this machine, with the implementation that runs it."""
    _, each = _calls_with_functions(platform)[text]
    return _record(platform, *each)[text]


def _record(platform: str, function: Any, arguments: list[Any]) -> dict[str, RecordedCall]:
    """The calls of a function. It is lowered, which needs no such device, and not run."""
    recorder = Recorder()
    # The settings of a user's process, on which the texts of calls depend.
    with jaxgrad.config.override(tuning=recorder), jax.default_matmul_precision("default"), jax.enable_x64(False):
        jax.jit(function).trace(*arguments).lower(lowering_platforms=(lowering_platform(platform),))
    return recorder.calls
