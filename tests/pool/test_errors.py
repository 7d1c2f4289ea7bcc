"""Each invalid argument raises an error with its name, the expected value and the given value."""

from __future__ import annotations

import re

import jax
import numpy as np
import pytest

import jaxgrad

X = np.ones((2, 6, 5, 3), np.float32)


def _raises(error: type[Exception], *parts: str, **changes) -> None:
    pattern = "^jaxgrad.max_pool: " + ".*".join(re.escape(part) for part in parts)
    with pytest.raises(error, match=pattern):
        jaxgrad.max_pool(**{"inputs": X, "window_shape": (2, 2), **changes})


@pytest.mark.parametrize("value", ["text", None, object(), [[1.0], [1.0, 2.0]]])
def test_no_array(value):
    _raises(TypeError, f"inputs must be an array, got {type(value).__name__}", inputs=value)


@pytest.mark.parametrize("dtype", ["int32", "bool", "complex64", "uint8"])
def test_dtype(dtype):
    _raises(TypeError, "inputs must", "float32, float64, bfloat16, float16", f"got {dtype}", inputs=X.astype(dtype))


def test_rank():
    _raises(ValueError, "inputs must have rank 3 or more for 2 spatial axes, got rank 2", inputs=X[0, 0])


@pytest.mark.parametrize("name", ["window_shape", "strides", "window_dilation"])
def test_sizes(name):
    for value in (2, "ab", (1.5, 2), (None, 1), {"a": 1}):
        _raises(TypeError, "", f"{name} must be", "got", **{name: value})
    for value in ((0, 1), (2, -1)):
        _raises(ValueError, f"each element of {name} must be positive, got {value}", **{name: value})
    if name != "window_shape":
        _raises(ValueError, f"{name} must have 2 elements, as many as window_shape, got (1, 2, 3)", **{name: (1, 2, 3)})
    _raises(ValueError, "window_shape must have an element for each spatial axis, got none", window_shape=())


def test_padding():
    for value in (1, None, b"SAME", object(), {"a": 1}, 1.5):
        _raises(TypeError, "padding must be 'SAME', 'VALID', 'SAME_LOWER' or 2 pairs of ints", padding=value)
    _raises(TypeError, "each pair of padding must be a sequence of ints, got int", padding=(1, 1))
    _raises(ValueError, "padding must be one of 'SAME', 'VALID', 'SAME_LOWER', got 'full'", padding="full")
    for value in (((1, 1),), ((1, 1), (1, 1), (1, 1)), ((1, 1), (1,))):
        _raises(ValueError, "padding must be", "2 pairs of ints, got", padding=value)
    one_axis = "padding must be 'SAME', 'VALID', 'SAME_LOWER' or a pair of ints in a sequence, got int"
    _raises(TypeError, one_axis, padding=1, window_shape=(2,))


def test_sizes_that_do_not_fit():
    for changes in (
        {"padding": ((2**62, 0), (0, 0))},
        {"strides": (2**62, 1)},
        {"window_dilation": (2**62, 1)},
        {"padding": ((2**60, 0), (0, 0))},
    ):
        _raises(ValueError, "", "must fit into 62 bits", **changes)


@pytest.mark.parametrize("name", ["max_pool_forward", "sum_pool_forward", "sum_pool_input_gradient"])
def test_calls_without_channels(name):
    """XLA runs them, but a program may call the handler."""
    shapes = [jax.ShapeDtypeStruct((3, size, 0), "float32") for size in (4, 1)]
    operand, result = reversed(shapes) if name.endswith("gradient") else shapes
    sizes = {"window": (4,), "strides": (1,), "padding": (0, 0), "dilation": (1,)}
    attributes = {key: np.array(value, np.int64) for key, value in sizes.items()}
    attributes |= {"divisor": np.int64(4)} if name.startswith("sum") else {}
    jaxgrad.max_pool(X, (2, 2), implementation="cpu")  # registers the handlers
    call = jax.ffi.ffi_call(f"jaxgrad_cpu_{name}", [result, jax.ShapeDtypeStruct((1 << 16,), "uint8")])
    assert call(np.zeros(operand.shape, operand.dtype), **attributes)[0].shape == result.shape


def test_feature_axis():
    _raises(ValueError, "feature_axis must be the last axis, 3 or -1, or", "1 or -3, got 2", feature_axis=2)
    _raises(TypeError, "feature_axis must be an int, got float", feature_axis=1.0)


def test_implementation():
    _raises(ValueError, "implementation must be one of", "got 'gpu'", implementation="gpu")
    _raises(ValueError, "implementation='cudnn' cannot run", implementation="cudnn")
    traced = jax.jit(lambda x: jaxgrad.max_pool(x, (2, 2), implementation="cpu")).trace(X)
    with pytest.raises(ValueError, match="implementation='cpu' runs on the platform 'cpu' only, got 'gpu'"):
        traced.lower(lowering_platforms=("cuda",))
