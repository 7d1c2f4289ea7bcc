"""Each invalid argument raises an error with its name, the expected value and the given value."""

from __future__ import annotations

import re

import jax
import numpy as np
import pytest

import jaxgrad

X = np.ones((4, 6, 3), np.float32)


def _raises(error: type[Exception], *parts: str, **changes) -> None:
    pattern = "^jaxgrad.resize: " + ".*".join(re.escape(part) for part in parts)
    with pytest.raises(error, match=pattern):
        jaxgrad.resize(**{"image": X, "shape": (8, 12, 3), "method": "nearest", **changes})


@pytest.mark.parametrize("value", ["text", None, object(), [[1.0], [1.0, 2.0]]])
def test_no_array(value):
    _raises(TypeError, f"image must be an array, got {type(value).__name__}", image=value)


def test_keys():
    keys = jax.random.split(jax.random.key(0), 4)
    _raises(TypeError, "image must be an array of numbers for", "LINEAR", image=keys, shape=(8,), method="linear")


def test_shape():
    for value in (8, "abc", None, {8: 1}, b"abc", np.int32(8)):
        _raises(TypeError, "shape must be a sequence of ints, got", shape=value)
    for value in ((8, 12.0, 3), (8, None, 3), (8, True, 3), np.ones(3)):
        _raises(TypeError, "each element of shape must be an int, got", shape=value)
    for value in ((), (8, 12), (1, 8, 12, 3)):
        _raises(
            ValueError, f"shape must have 3 elements, one for each axis of image {X.shape}, got {value}", shape=value
        )
    _raises(ValueError, "no element of shape may be negative, got (8, -1, 3)", shape=(8, -1, 3))


def test_method():
    for value in (None, 0, b"nearest"):
        _raises(
            TypeError, f"method must be a string or a jax.image.ResizeMethod, got {type(value).__name__}", method=value
        )
    _raises(ValueError, "method must be one of 'nearest', 'linear', ", "got 'Nearest'", method="Nearest")


@pytest.mark.parametrize("value", [None, 1, "yes"])
def test_antialias(value):
    _raises(TypeError, f"antialias must be a bool, got {type(value).__name__}", antialias=value)
