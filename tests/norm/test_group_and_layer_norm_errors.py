"""Each invalid argument of `group_norm`, `layer_norm` and `rms_norm` raises an error with its name and the values."""

from __future__ import annotations

import re

import jax
import numpy as np
import pytest

import jaxgrad

OPS = ("group_norm", "layer_norm", "rms_norm")
X, C = np.ones((4, 5, 6), np.float32), np.ones(6, np.float32)


def _raises(op, error, *parts, **changes):
    arguments = {"x": X, "scale": C, "bias": C, **({"num_groups": 2} if op == "group_norm" else {}), **changes}
    pattern = f"^jaxgrad.{op}: " + ".*".join(re.escape(part) for part in parts)
    with pytest.raises(error, match=pattern):
        getattr(jaxgrad, op)(**arguments)


@pytest.mark.parametrize("op", OPS)
def test_arrays(op):
    for name in ("x", "scale", "bias", "residual"):
        _raises(op, TypeError, f"{name} must be an array, got str", **{name: "text"})
    _raises(op, TypeError, "x must", "float32, float64, bfloat16, float16", "got int32", x=X.astype("i4"))
    _raises(op, TypeError, "scale must have the dtype float32, as x has float32, got float16", scale=C.astype("f2"))
    _raises(
        op, TypeError, "bias must have the dtype of scale, float16, got float32", x=X.astype("f2"), scale=C.astype("f2")
    )
    _raises(op, TypeError, "residual must have the dtype of x, float32, got float16", residual=X.astype("f2"))
    _raises(op, ValueError, "residual must have the shape of x, (4, 5, 6), got (5, 6)", residual=X[0])
    dim = "C" if op == "group_norm" else "x.shape[2]"
    _raises(op, ValueError, f"bias must have the shape [{dim}] = (6,), got (5,)", bias=C[:5])
    _raises(op, ValueError, f"scale must have rank 1, [{dim}] = (6,), got rank 2, (1, 6)", scale=C[None])


@pytest.mark.parametrize("op", OPS)
def test_options(op):
    for epsilon in (-1e-9, float("nan"), float("inf")):
        _raises(op, ValueError, "epsilon must be finite and not negative", f"got {epsilon}", epsilon=epsilon)
    _raises(op, TypeError, "epsilon must be a Python number, got str", epsilon="1e-5")
    for activation in ("tanh", jax.nn.tanh, 0):
        _raises(op, ValueError, "activation must be one of None, 'relu', 'silu', 'gelu', got", activation=activation)
    _raises(op, ValueError, "implementation must be one of None, 'xla', 'cpu'", "got 'metal'", implementation="metal")
    _raises(op, ValueError, "implementation", "cudnn", implementation="cudnn")


def test_groups():
    for num_groups in (0, -2, 4, 7):
        expected = f"num_groups must divide C = 6, the size of the feature axis, got {num_groups}"
        _raises("group_norm", ValueError, expected, num_groups=num_groups)
    for num_groups in (2.0, "2", None, True):
        _raises(
            "group_norm",
            TypeError,
            f"num_groups must be an int, got {type(num_groups).__name__}",
            num_groups=num_groups,
        )
    _raises("group_norm", ValueError, "x must have rank 2 or more, got rank 1, (6,)", x=C)
    _raises("group_norm", ValueError, "feature_axis must lie in [-3, 3)", "got 3", feature_axis=3)
    for axis in (0, -3):
        _raises("group_norm", ValueError, "feature_axis must not be the first axis of x", feature_axis=axis)


@pytest.mark.parametrize("op", OPS[1:])
def test_normalized_axes(op):
    for axis in (3, -4, (0, 3)):
        _raises(op, ValueError, "axis must lie in [-3, 3), as x has rank 3, got", axis=axis)
    for axis in (1.0, "1", None, True, (1, None)):
        _raises(op, TypeError, "axis must be an int, got", axis=axis)
    for axis in ((), (1, 1), (2, -1)):
        _raises(op, ValueError, "axis must be one axis or several different axes, got", axis=axis)
    _raises(op, ValueError, "x must have rank 1 or more, got rank 0", x=np.float32(1))
    _raises(op, ValueError, "scale must have rank 2, [x.shape[0], x.shape[2]] = (4, 6), got rank 1", axis=(2, 0))
