"""Calls on the command line of `python -m jaxgrad bench`: what they mean, and errors."""

from __future__ import annotations

import jax
import pytest

from jaxgrad import __main__ as program
from jaxgrad._src.bench import shapes
from jaxgrad._src.bench.command import _PARSERS
from jaxgrad._src.bench.default_calls import default_calls
from jaxgrad._src.tuning.timing import random_operands


def _shapes(call):
    return [operand.shape for operand in call.operands()]


def test_a_convolution():
    call = shapes.conv("8x56x28x64,3x5,128,stride=2x1,padding=1x2,dilation=1,groups=32,layout=NCHW,dtype=bf16")
    assert call.text == "conv 8x56x28x64,3x5,128,stride=2x1,padding=1x2,dilation=1,groups=32,layout=NCHW,dtype=bf16"
    assert _shapes(call) == [(8, 64, 56, 28), (128, 2, 3, 5), (8, 128, 28, 28)]
    assert {operand.dtype.name for operand in call.operands()} == {"bfloat16"}
    assert (call.stride, call.pads, call.dilation, call.groups) == ((2, 1), ((1, 1), (2, 2)), (1, 1), 32)


def test_defaults_of_a_convolution():
    """ "SAME", as in jax.lax, and features last. A causal one reads the past alone."""
    call = shapes.conv("2x9x5,3,7,stride=2,dtype=f32")
    assert _shapes(call) == [(2, 9, 5), (3, 5, 7), (2, 5, 7)]
    assert shapes.conv("2x9x5,3,7,dilation=4,padding=causal").pads == ((8, 0),)
    assert shapes.conv("2x9x8x7x5,3,7").dimension_numbers == ("NDHWC", "DHWIO", "NDHWC")


@pytest.mark.parametrize(
    ("options", "size"), [("", 10), (",padding=VALID", 11), (",padding=1", 9), (",padding=0,dilation=2", 13)]
)
def test_a_transposed_convolution(options, size):
    """Numbers are the padding of the convolution that is transposed, as in PyTorch."""
    call = shapes.conv_transpose(f"2x5x8,3,4,stride=2{options},dtype=f32")
    assert _shapes(call) == [(2, 5, 8), (3, 8, 4), (2, size, 4)]
    x, w, y = call.operands()
    assert jax.eval_shape(call.on_xla, x, w).shape == y.shape


def test_other_ops():
    call = shapes.batch_norm("4x6x5,feature_axis=1,activation=relu,dtype=f16")
    assert _shapes(call) == [(4, 6, 5), (6,), (6,), (4, 6, 5)]
    assert (call.feature_axis, call.activation, call.dtype) == (1, "relu", "float16")
    call = shapes.group_norm("4x7x6,groups=3,activation=silu,dtype=f32")
    assert _shapes(call) == [(4, 7, 6), (6,), (6,), (4, 7, 6)]
    assert (call.groups, call.activation) == (3, "silu")
    assert _shapes(shapes.layer_norm("4x7,dtype=f32")) == [(4, 7), (7,), (7,), (4, 7)]
    assert _shapes(shapes.rms_norm("4x7,dtype=f32")) == [(4, 7), (7,), (4, 7)]
    call = shapes.gru("7,4,3,5,direction=bidirectional,linear_before_reset=false,dtype=f32")
    assert _shapes(call)[:3] == [(7, 4, 3), (2, 15, 3), (2, 15, 5)]
    assert not call.linear_before_reset


def test_a_program_has_one_call_of_a_long_gru(monkeypatch):
    """XLA would compile the loops of each call."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    for steps, calls in ((7, 8), (64, 1)):
        call = shapes.gru(f"{steps},4,3,5,dtype=f32")
        sets = random_operands(call.operands(), call.deviations(), one_call_a_program=call.one_call_a_program)
        assert len(sets) == calls


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_the_default_calls(platform):
    """They are calls of every op, and can be made."""
    calls = default_calls(platform)
    assert {name for name, _ in calls} == set(_PARSERS)
    for name, text in calls:
        assert min(min(shape) for shape in _shapes(_PARSERS[name][0](f"{text},dtype=f32"))) > 0


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ("--conv 8x56x56x64,3x3", "--conv: must be like 8x56x56x64,3x3,128 (batch x sizes x features, window, output"),
        (
            "--conv 8x64,3,128",
            "--conv: the first value must be batch x 1 to 3 sizes x features, joined by x, got '8x64'",
        ),
        ("--conv 8x0x64,3,128", "sizes x features, joined by x, got '8x0x64'"),
        ("--conv 8x9x9x6,3x3x3,8", "the window must be a number, or 2 joined by x, got '3x3x3'"),
        ("--conv 8x9x9x6,3,-8", "the output features must be a positive number, got '-8'"),
        ("--conv 8x9x9x6,3,8,groups=4", "groups must divide the features, 6, and the output features, 8, got 4"),
        (
            "--conv 8x9x9x6,3,8,strides=2",
            "options are each of stride=, padding=, dilation=, groups=, layout=, dtype= once",
        ),
        ("--conv 8x9x9x6,3,8,stride=2,stride=2", "once, got 'stride=2' in '8x9x9x6,3,8,stride=2,stride=2'"),
        (
            "--conv 8x9x9x6,3,8,padding=same",
            "padding must be SAME, VALID, causal, a number, or 2 joined by x, got 'same'",
        ),
        (
            "--conv-transpose 8x9x6,3,8,padding=causal",
            "padding must be SAME, VALID, a number, or 1 joined by x, got 'caus",
        ),
        ("--conv 8x9x9x6,3,8,layout=NCW", "layout must be NHWC or NCHW, got 'NCW'"),
        ("--conv 8x9x9x6,3,8,dtype=f64", "dtype must be f32, bf16, f16, got 'f64'"),
        ("--conv 8x2x9x6,3,8,padding=VALID", "must leave an output, got one of the sizes 0x7"),
        ("--conv-transpose 8x2x6,3,8,padding=3", "must leave an output, got one of the sizes -2"),
        ("--batch-norm 64", "--batch-norm: the first value must be 2 sizes or more, joined by x, got '64'"),
        ("--batch-norm 8x9,feature_axis=2", "feature_axis must be an axis of 8x9, 0 to 1, got '2'"),
        ("--batch-norm 8x9,activation=tanh", "activation must be relu or silu or gelu, got 'tanh'"),
        ("--group-norm 8x9,groups=2", "groups must divide the features, 9, got 2"),
        ("--group-norm 8x9,feature_axis=0", "feature_axis must be an axis of 8x9, 1 to 1, got '0'"),
        (
            "--gru 100,32,64",
            "--gru: must be like 100,32,64,128 (steps, batch, input size, hidden size), got '100,32,64'",
        ),
        ("--gru 100,32,64,x", "the hidden size must be a positive number, got 'x'"),
        ("--gru 9,3,6,2,direction=reverse", "direction must be forward or bidirectional, got 'reverse'"),
        ("--gru 9,3,6,2,linear_before_reset=1", "linear_before_reset must be true or false, got '1'"),
        ("--dtype f64", "--dtype: dtype must be f32, bf16, f16, got 'f64'"),
        ("--seconds 0", "--seconds: must be a positive number, got '0'"),
        ("--seconds soon", "--seconds: must be a positive number, got 'soon'"),
        ("--json no/such/folder/file", "--json: must be in a folder that exists, got 'no/such/folder/file'"),
        ("--chart chart.gif", "--chart: must end with .png or .svg, got 'chart.gif'"),
    ],
)
def test_errors(arguments, error, capsys):
    with pytest.raises(SystemExit, match="2"):
        program.main(["bench", *arguments.split()])
    assert f"python -m jaxgrad bench: error: argument {error if error[:2] == '--' else ''}" in (
        text := capsys.readouterr().err
    )
    assert error in text
