"""Each invalid argument raises an error with its name, the expected value and the given value."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from backends import CPU_KERNEL
from gru_cases import Case, make_inputs
from gru_running import values_and_gradients

import jaxgrad

CASE = Case(T=5, B=3, I=4, H=6)
DIMS = {
    "x": "[T, B, I]",
    "w": "[D, 3H, I] = (1, 18, 4)",
    "r": "[D, 3H, H]",
    "b": "[D, 6H] = (1, 36)",
    "sequence_lens": "[B] = (3,)",
    "initial_h": "[D, B, H] = (1, 3, 6)",
    "reset": "[T, B] = (5, 3)",
    "reset_h": "[D, B, H] = (1, 3, 6)",
}


def _call(settings=None, **changes):
    return jaxgrad.gru(**make_inputs(CASE, "float32")[0]._replace(**changes)._asdict(), **(settings or {}))


def _array(name):
    return getattr(make_inputs(CASE, "float32")[0], name)


def _says(*parts: str) -> str:
    """A pattern that matches the op and then the parts, in order."""
    return "^jaxgrad.gru: " + ".*".join(re.escape(part) for part in parts)


@pytest.mark.parametrize("name", DIMS)
@pytest.mark.parametrize("change", ["more", "less"])
@pytest.mark.parametrize("traced", [False, True])
def test_rank(name, change, traced):
    array = _array(name)
    wrong = array[None] if change == "more" else array[0]
    message = _says(f"{name} must have rank {array.ndim}", DIMS[name], f"got rank {wrong.ndim}, {wrong.shape}")
    with pytest.raises(ValueError, match=message):
        jax.jit(lambda wrong: _call(**{name: wrong}))(wrong) if traced else _call(**{name: wrong})


@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [
        ("w", (2, 18, 4), "(1, 18, 4)"),
        ("w", (1, 19, 4), "(1, 18, 4)"),
        ("w", (1, 18, 5), "(1, 18, 4)"),
        ("r", (2, 18, 6), "(1, 18, 6)"),
        ("r", (1, 24, 6), "(1, 18, 6)"),
        ("r", (1, 18, 5), "(1, 15, 5)"),
        ("b", (2, 36), "(1, 36)"),
        ("b", (1, 18), "(1, 36)"),
        ("initial_h", (2, 3, 6), "(1, 3, 6)"),
        ("initial_h", (1, 1, 6), "(1, 3, 6)"),
        ("initial_h", (1, 3, 4), "(1, 3, 6)"),
        ("reset", (3, 5), "(5, 3)"),
        ("reset", (1, 3), "(5, 3)"),
        ("reset_h", (2, 3, 6), "(1, 3, 6)"),
        ("reset_h", (1, 1, 6), "(1, 3, 6)"),
        ("sequence_lens", (1,), "(3,)"),
        ("sequence_lens", (4,), "(3,)"),
    ],
)
def test_dimensions(name, shape, expected):
    wrong = np.zeros(shape, _array(name).dtype)
    with pytest.raises(ValueError, match=_says(f"{name} must have the shape [", f"= {expected}, got {shape}")):
        _call(**{name: wrong})


def test_bidirectional_needs_weights_of_both_directions():
    with pytest.raises(ValueError, match=_says("r must have the shape [D, 3H, H] = (2, 18, 6), got (1, 18, 6)")):
        _call({"direction": "bidirectional"})


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"r": np.zeros((1, 0, 0), np.float32), "w": np.zeros((1, 0, 4), np.float32)}, "r"),
        ({"x": np.zeros((5, 3, 0), np.float32), "w": np.zeros((1, 18, 0), np.float32)}, "x"),
    ],
)
def test_sizes_of_zero(changes, name):
    with pytest.raises(ValueError, match=_says(f"the last dimension of {name} must be positive", ", 0)")):
        _call(**changes)


@pytest.mark.parametrize("dtype", ["int32", "complex64", "bool", "uint8", "float8_e4m3fn"])
def test_x_dtype(dtype):
    x = jnp.zeros((5, 3, 4), dtype)
    with pytest.raises(TypeError, match=_says("x must", "float32, float64, bfloat16, float16", f"got {dtype}")):
        _call(x=x)


@pytest.mark.parametrize("name", ["w", "r", "b", "initial_h", "reset_h"])
@pytest.mark.parametrize("dtype", ["float64", "bfloat16", "int32", "complex64"])
def test_mixed_dtypes(name, dtype):
    wrong = _array(name).astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    with pytest.raises(TypeError, match=_says(f"{name} must have the dtype of x, float32, got {dtype}")):
        _call(**{name: wrong})


@pytest.mark.parametrize("name", DIMS)
@pytest.mark.parametrize(
    "value", ["text", {"a": 1}, object(), [[1.0, 2.0], [3.0]]], ids=["text", "dict", "object", "ragged"]
)
def test_non_array_argument(name, value):
    with pytest.raises(TypeError, match=_says(f"{name} must be an array, got {type(value).__name__}")):
        _call(**{name: value})


@pytest.mark.parametrize("name", ["x", "w", "r"])
def test_missing_required_array(name):
    with pytest.raises(TypeError, match=_says(f"{name} must be an array, got NoneType")):
        _call(**{name: None})


@pytest.mark.parametrize("dtype", ["float32", "bool", "complex64"])
@pytest.mark.parametrize("convert", [np.asarray, jnp.asarray], ids=["numpy", "jax"])
def test_non_integer_lengths(dtype, convert):
    with pytest.raises(TypeError, match=_says(f"sequence_lens must have an integer dtype, got {dtype}")):
        _call(sequence_lens=convert(np.ones(3, dtype)))


def test_resets_of_another_dtype():
    for array in (np.ones((5, 3), "complex64"), jax.random.split(jax.random.key(0), (5, 3))):
        with pytest.raises(
            TypeError, match=_says(f"reset must be an array of bools, ints or floats, got {array.dtype}")
        ):
            _call(reset=array)


def test_resets_as_a_list():
    inputs, _ = make_inputs(CASE, "float32")
    for found, expected in zip(_call(reset=inputs.reset.tolist()), _call(), strict=True):
        np.testing.assert_array_equal(found, expected)


def test_states_of_resets_without_resets():
    with pytest.raises(ValueError, match=_says("reset_h requires reset", "[T, B]", "got reset=None")):
        _call(reset=None)


@pytest.mark.parametrize("wrong", [6, -1, 2**31, -(2**40), 2**64, -(2**70)])
@pytest.mark.parametrize("convert", [list, tuple, np.array], ids=["list", "tuple", "numpy"])
def test_lengths_out_of_range_on_the_host(wrong, convert):
    with pytest.raises(ValueError, match=_says("sequence_lens must lie in [0, T] = [0, 5]", f"got {wrong}")):
        _call(sequence_lens=convert([5, wrong, 0]))


@pytest.mark.parametrize(
    ("dtype", "wrong"),
    [
        *(("int8", n) for n in (6, -1)),
        *(("int32", n) for n in (6, -1)),
        *(("int64", n) for n in (6, -1, 2**31 + 1, 2**32 + 1, -(2**32) + 1)),
        *(("uint32", n) for n in (6, 2**31 + 1)),
    ],
)
@pytest.mark.parametrize("jitted", [False, True])
def test_lengths_out_of_range_on_the_device(dtype, wrong, jitted):
    """Traced values raise when the CPU kernel runs; tests/gru/test_lengths.py tests the behavior on XLA."""
    inputs = CPU_KERNEL.put(make_inputs(CASE, "float32")[0])

    def call(lens):
        return CPU_KERNEL.gru(*inputs._replace(sequence_lens=CPU_KERNEL.put(np.array(lens, dtype))))

    def traced(lens):
        run = jax.jit(lambda lens: CPU_KERNEL.gru(*inputs._replace(sequence_lens=lens)))
        return run(CPU_KERNEL.put(np.array(lens, dtype)))

    run = traced if jitted else call
    with pytest.raises(jax.errors.JaxRuntimeError if jitted else ValueError, match=r"sequence_lens.*\[0, (T|5)\]"):
        jax.block_until_ready(run([5, wrong, 0]))
    y, _ = run([5, 1, 0])  # the process continues
    np.testing.assert_array_equal(y[1:, :, 1:], 0)


def test_lengths_out_of_range_under_differentiation():
    inputs, cotangents = make_inputs(CASE, "float32")
    inputs.sequence_lens[1] = 9
    with pytest.raises(jax.errors.JaxRuntimeError, match="sequence_lens"):
        values_and_gradients(CPU_KERNEL, inputs, cotangents, {})


@pytest.mark.parametrize("convert", [np.asarray, jnp.asarray], ids=["numpy", "jax"])
def test_errors_of_a_batch_major_x_name_the_axes(convert):
    x, w, r = np.ones((2, 5, 4), np.float32), np.ones((1, 9, 4), np.float32), np.ones((1, 9, 3), np.float32)
    for wrong in (
        {"initial_h": np.ones((1, 2, 3), np.float32)},
        {"sequence_lens": np.array([5, 4])},
        {"reset": np.ones((5, 2), bool)},
        {"reset": np.ones((2, 5), bool), "reset_h": np.ones((1, 2, 3), np.float32)},
    ):
        given = {name: convert(value) for name, value in wrong.items()}
        message = r"x \[T, B, I\] has T = 2 steps and B = 5 rows"
        with pytest.raises(ValueError, match=message):
            jaxgrad.gru(x, w, r, **given)
    with pytest.raises(ValueError, match=r"\[0, 2\], got 5; x \[T, B, I\] has T = 2 steps and B = 5 rows"):
        jaxgrad.gru(x, w, r, sequence_lens=convert(np.array([5, 2, 1, 2, 1])))


def test_errors_of_a_time_major_x_name_the_axes():
    x, w, r = np.ones((5, 2, 4), np.float32), np.ones((1, 9, 4), np.float32), np.ones((1, 9, 3), np.float32)
    note = r"; x \[B, T, I\] has B = 5 rows and T = 2 steps"
    for wrong, dims in (
        ({"initial_h": np.ones((1, 2, 3), np.float32)}, r"\[B, D, H\] = \(5, 1, 3\)"),
        ({"reset": np.ones((2, 5), bool)}, r"\[B, T\] = \(5, 2\)"),
        ({"sequence_lens": np.array([1, 2])}, r"\[B\] = \(5,\)"),
    ):
        with pytest.raises(ValueError, match=rf"^jaxgrad.gru: \w+ must have the shape {dims}.*{note}"):
            jaxgrad.gru(x, w, r, **wrong, time_major=False)
    with pytest.raises(ValueError, match=r"x must have rank 3, \[B, T, I\]"):
        jaxgrad.gru(x[0], w, r, time_major=False)
    with pytest.raises(ValueError, match=r"an array \[B, T\] that says where"):
        jaxgrad.gru(x, w, r, reset_h=np.ones((5, 1, 3), np.float32), time_major=False)


@pytest.mark.parametrize("clip", [0, 0.0, -1, -1e-9, float("nan"), float("-inf"), np.float32(-2)], ids=repr)
def test_non_positive_clip(clip):
    with pytest.raises(ValueError, match=_says("clip must be positive", f"got {clip}")):
        _call({"clip": clip})


@pytest.mark.parametrize(
    "clip", ["1", True, np.True_, [1.0], 1j, jnp.float32(1), np.array(1.0)], ids=lambda v: type(v).__name__
)
def test_non_numeric_clip(clip):
    with pytest.raises(TypeError, match=_says("clip must be a Python number or None", f"got {type(clip).__name__}")):
        _call({"clip": clip})


@pytest.mark.parametrize("direction", ["backward", "Forward", "", None, 0, b"forward", ["forward"]], ids=repr)
def test_an_unknown_direction(direction):
    expected = "'forward', 'reverse', 'bidirectional'"
    with pytest.raises(ValueError, match=_says("direction must be one of", expected, f"got {direction!r}")):
        _call({"direction": direction})


@pytest.mark.parametrize("implementation", ["metal", "CPU", "", False, 1, ["cpu"]], ids=repr)
def test_an_unknown_implementation(implementation):
    expected = "None, 'xla', 'cpu'"
    with pytest.raises(ValueError, match=_says("implementation must be one of", expected, f"got {implementation!r}")):
        _call({"implementation": implementation})


@pytest.mark.parametrize("flag", [0, 1, None, "True", 1.0, np.array(True)], ids=repr)
@pytest.mark.parametrize("name", ["linear_before_reset", "time_major"])
def test_non_bool_flag(name, flag):
    with pytest.raises(TypeError, match=_says(f"{name} must be a bool", f"got {type(flag).__name__}")):
        _call({name: flag})


def test_numpy_bool_flag():
    for found, expected in zip(
        _call({"linear_before_reset": np.True_}), _call({"linear_before_reset": True}), strict=True
    ):
        np.testing.assert_array_equal(found, expected)
