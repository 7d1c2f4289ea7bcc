"""Invalid arguments raise the errors of `jax.lax`; errors for additional arguments name the argument."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxgrad

X, W = np.ones((2, 6, 5, 4), np.float32), np.ones((8, 6, 3, 2), np.float32)
LAST, WINDOW = np.ones((2, 5, 4, 6), np.float32), np.ones((3, 2, 6, 8), np.float32)
TO_NHWC = {"dimension_numbers": ("NHWC", "HWIO", "NHWC")}

AS_LAX = {
    "rank": (X, W[0], (1, 1), "SAME", {}),
    "features": (X, np.ones((8, 5, 3, 2), np.float32), (1, 1), "SAME", {}),
    "features in another layout": (LAST, W, (1, 1), "SAME", TO_NHWC),
    "groups do not divide the features": (X, W, (1, 1), "SAME", {"feature_group_count": 4}),
    "groups do not divide the output features": (
        X,
        np.ones((7, 3, 3, 2), np.float32),
        (1, 1),
        "SAME",
        {"feature_group_count": 2},
    ),
    "no groups": (X, W, (1, 1), "SAME", {"feature_group_count": 0}),
    "negative groups": (X, W, (1, 1), "SAME", {"feature_group_count": -1}),
    "both kinds of groups": (X, W, (1, 1), "SAME", {"feature_group_count": 2, "batch_group_count": 2}),
    "batch groups": (X, W, (1, 1), "SAME", {"batch_group_count": 3}),
    "dtypes": (X, W.astype(np.float64), (1, 1), "SAME", {}),
    "float and integer": (X, W.astype(np.int32), (1, 1), "SAME", {}),
    "too few strides": (X, W, (1,), "VALID", {}),
    "too many strides": (X, W, (1, 1, 1), ((0, 0), (0, 0)), {}),
    "stride 0": (X, W, (0, 1), ((0, 0), (0, 0)), {}),
    "negative stride": (X, W, (1, -1), ((0, 0), (0, 0)), {}),
    "unknown padding": (X, W, (1, 1), "FULL", {}),
    "too few pairs": (X, W, (1, 1), ((0, 0),), {}),
    "numbers for pairs": (X, W, (1, 1), (1, 1), {}),
    "three in a pair": (X, W, (1, 1), ((0, 0, 0), (0, 0, 0)), {}),
    "fractions": (X, W, (1, 1), ((0.5, 0), (0, 0)), {}),
    "named padding of a dilated input": (X, W, (1, 1), "SAME", {"lhs_dilation": (2, 1)}),
    "dilation 0": (X, W, (1, 1), "VALID", {"rhs_dilation": (0, 1)}),
    "input dilation 0": (X, W, (1, 1), ((0, 0), (0, 0)), {"lhs_dilation": (0, 1)}),
    "too few dilations": (X, W, (1, 1), ((0, 0), (0, 0)), {"rhs_dilation": (2,)}),
    "layout of another rank": (X, W, (1, 1), "SAME", {"dimension_numbers": ("NCW", "OIW", "NCW")}),
    "layout with a letter twice": (X, W, (1, 1), "SAME", {"dimension_numbers": ("NCHH", "OIHW", "NCHW")}),
    "layout with other letters": (X, W, (1, 1), "SAME", {"dimension_numbers": ("NCHW", "OIXY", "NCHW")}),
    "unknown precision": (X, W, (1, 1), "SAME", {"precision": "very high"}),
    "padding removes all": (X, W, (1, 1), ((-9, 0), (0, 0)), {}),
}


@pytest.mark.parametrize("name", AS_LAX)
@pytest.mark.parametrize("implementation", [None, "onednn", "xla"])
def test_the_same_error_as_lax(name, implementation):
    lhs, rhs, strides, padding, settings = AS_LAX[name]
    with pytest.raises(Exception, match=r"\S") as expected:
        lax.conv_general_dilated(lhs, rhs, strides, padding, **settings)
    with pytest.raises((expected.type, ValueError), match=r"\S") as found:
        jaxgrad.conv_general_dilated(lhs, rhs, strides, padding, **settings, implementation=implementation)
    if expected.type in (TypeError, ValueError):
        assert found.type is expected.type


@pytest.mark.parametrize("op", ["conv_general_dilated", "conv_transpose"])
@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        (
            {"implementation": "metal"},
            ValueError,
            "implementation must be one of None, 'xla', 'cpu', 'cuda', 'cudnn', 'onednn', got 'metal'",
        ),
        ({"implementation": True}, ValueError, "implementation must be one of"),
        ({"activation": "tanh"}, ValueError, "activation must be one of None, 'relu', 'silu', 'gelu', got 'tanh'"),
        ({"activation": True}, ValueError, "activation must be one of None, 'relu', 'silu', 'gelu', got True"),
        ({"activation": np.tanh}, ValueError, "activation must be one of None, 'relu', 'silu', 'gelu', got <ufunc"),
        ({"bias": np.ones(7, np.float32)}, ValueError, r"bias must have the shape .*\(8,\), got \(7,\)"),
        ({"bias": np.ones((1, 8), np.float32)}, ValueError, r"bias must have rank 1.*got rank 2"),
        ({"bias": np.float32(1)}, ValueError, r"bias must have rank 1.*got rank 0"),
        ({"bias": np.ones(8, np.float64)}, TypeError, "bias must have the dtype of the result, float32, got float64"),
        ({"bias": np.ones(8, np.int32)}, TypeError, "bias must have the dtype of the result, float32, got int32"),
        ({"bias": "none"}, TypeError, "bias must be an array, got str"),
    ],
    ids=str,
)
def test_errors_of_jaxgrad_arguments(op, settings, error, message):
    with pytest.raises(error, match=rf"jaxgrad.{op}: {message}"):
        getattr(jaxgrad, op)(LAST, WINDOW, (1, 1), "SAME", **TO_NHWC, **settings)


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"window_strides": 1}, TypeError, "window_strides must be a sequence of ints, got int"),
        ({"window_strides": None}, TypeError, "window_strides must be a sequence of ints, got NoneType"),
        ({"window_strides": (0, 1)}, ValueError, r"window_strides must be positive integers, got \(0, 1\)"),
        ({"window_strides": (1, np.int64(-1))}, ValueError, r"window_strides must be positive integers, got \(1, "),
        ({"window_strides": jnp.array([1, 0])}, ValueError, "window_strides must be positive integers, got "),
        ({"lhs_dilation": 2}, TypeError, "lhs_dilation must be a sequence of ints, got int"),
        ({"window_strides": (1, 1.0)}, TypeError, "each element of window_strides must be an int, got float"),
        ({"window_strides": (True, 1)}, TypeError, "each element of window_strides must be an int, got bool"),
        ({"window_strides": b"\1\1"}, TypeError, "window_strides must be a sequence of ints, got bytes"),
        ({"window_strides": {1: 0, 2: 0}}, TypeError, "window_strides must be a sequence of ints, got dict"),
        ({"window_strides": (1 << 63, 1)}, ValueError, "each element of window_strides must fit into 64 bits, got "),
        ({"lhs_dilation": (1.0, 1)}, TypeError, "each element of lhs_dilation must be an int, got float"),
        ({"rhs_dilation": (1, 1.0)}, TypeError, "each element of rhs_dilation must be an int, got float"),
        ({"rhs_dilation": "11"}, TypeError, "rhs_dilation must be a sequence of ints, got str"),
        (
            {"rhs_dilation": (2,)},
            ValueError,
            r"rhs_dilation must have as many elements as window_strides, 2, got \(2,\)",
        ),
        ({"lhs_dilation": ()}, ValueError, r"lhs_dilation must have as many elements as window_strides, 2, got \(\)"),
        (
            {"padding": (((1 << 63) - 1, 1 - (1 << 63)), (1, 1))},
            ValueError,
            "each size of padding must fit into 63 bits, got 9223372036854775807",
        ),
        ({"feature_group_count": 1.0}, TypeError, "feature_group_count must be an int, got float"),
        ({"batch_group_count": None}, TypeError, "batch_group_count must be an int, got NoneType"),
        ({"rhs_dilation": 2}, TypeError, "rhs_dilation must be a sequence of ints, got int"),
        ({"padding": "FULL"}, ValueError, "padding must be 'SAME', 'SAME_LOWER', 'VALID' or pairs of ints, got 'FULL'"),
        ({"lhs": X[0, 0, 0], "rhs": W[0, 0, 0]}, ValueError, r"rank of at least 2, got \(4,\) and \(2,\)"),
    ],
    ids=str,
)
def test_errors_that_jax_lax_does_not_explain(settings, error, message):
    arguments = {"lhs": X, "rhs": W, "window_strides": (1, 1), "padding": "SAME", **settings}
    with pytest.raises(error, match=rf"jaxgrad.conv_general_dilated: .*{message}"):
        jaxgrad.conv_general_dilated(**arguments)


@pytest.mark.parametrize("name", ["window_strides", "lhs_dilation", "rhs_dilation"])
def test_floats_are_refused_after_equal_ints(name):
    """1.0 equals 1 in the keys of JAX's caches: a call that jax.lax refuses would break the calls after it."""
    settings = {"window_strides": (1, 1), "padding": ((1, 1), (0, 0)), "implementation": "xla"}
    ones = {**settings, name: (1, 1)}
    expected = jaxgrad.conv_general_dilated(X, W, **ones)
    with pytest.raises(TypeError, match=f"each element of {name} must be an int, got float"):
        jaxgrad.conv_general_dilated(X, W, **{**settings, name: (1.0, 1)})
    np.testing.assert_array_equal(jaxgrad.conv_general_dilated(X, W, **ones), expected)


@pytest.mark.parametrize("as_array", [np.array, jnp.array])
def test_arrays_of_ints_are_sequences(as_array):
    y = jaxgrad.conv_general_dilated(X, W, as_array([1, 2]), as_array([[1, 0], [0, 2]]), rhs_dilation=as_array([2, 1]))
    expected = jaxgrad.conv_general_dilated(X, W, (1, 2), ((1, 0), (0, 2)), rhs_dilation=(2, 1))
    np.testing.assert_array_equal(y, expected)


@pytest.mark.parametrize("op", ["conv_general_dilated", "conv_transpose"])
@pytest.mark.parametrize("name", ["lhs", "rhs"])
@pytest.mark.parametrize("value", ["text", None, object()], ids=["text", "none", "object"])
def test_non_array_operands(op, name, value):
    arguments = {"lhs": LAST, "rhs": WINDOW, name: value}
    with pytest.raises(TypeError, match=rf"jaxgrad.{op}: {name} must be an array, got"):
        getattr(jaxgrad, op)(arguments["lhs"], arguments["rhs"], (1, 1), "SAME")


def test_the_bias_has_the_preferred_dtype():
    lhs, rhs = LAST.astype(jnp.bfloat16), WINDOW.astype(jnp.bfloat16)
    settings = {**TO_NHWC, "preferred_element_type": np.float32}
    jaxgrad.conv_general_dilated(lhs, rhs, (1, 1), "SAME", bias=np.ones(8, np.float32), **settings)
    with pytest.raises(TypeError, match="bias must have the dtype of the result, float32, got bfloat16"):
        jaxgrad.conv_general_dilated(lhs, rhs, (1, 1), "SAME", bias=np.ones(8, jnp.bfloat16), **settings)


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"output_padding": 2}, ValueError, r"output_padding must lie in .*\[0, 2\), got 2"),
        ({"output_padding": (0, 3)}, ValueError, r"output_padding must lie in .*\[0, 3\), got 3"),
        ({"output_padding": -1}, ValueError, "output_padding must lie in .*got -1"),
        ({"output_padding": (1,)}, ValueError, "output_padding must be an integer or 2 integers"),
        ({"output_padding": (1, 1, 1)}, ValueError, "output_padding must be an integer or 2 integers"),
        ({"strides": (2,)}, ValueError, "strides must be 2 positive integers"),
        ({"strides": (0, 1)}, ValueError, "strides must be 2 positive integers"),
        ({"strides": (2, -1)}, ValueError, "strides must be 2 positive integers"),
        ({"rhs_dilation": (1,)}, ValueError, "rhs_dilation must be 2 positive integers"),
        ({"rhs_dilation": (0, 1)}, ValueError, "rhs_dilation must be 2 positive integers"),
        ({"padding": "FULL"}, ValueError, "padding must be 'SAME', 'VALID' or 2 pairs, got 'FULL'"),
        ({"padding": ((0, 0),)}, ValueError, "padding must have 2 pairs"),
        ({"transpose_kernel": "yes"}, TypeError, "transpose_kernel must be a bool"),
        ({"use_consistent_padding": "no"}, TypeError, "use_consistent_padding must be a bool, got str"),
        ({"strides": (1.7, 2)}, TypeError, "each element of strides must be an int, got float"),
        ({"strides": (True, 2)}, TypeError, "each element of strides must be an int, got bool"),
        ({"strides": None}, TypeError, "strides must be a sequence of ints, got NoneType"),
        ({"strides": 2}, TypeError, "strides must be a sequence of ints, got int"),
        ({"strides": "22"}, TypeError, "strides must be a sequence of ints, got str"),
        ({"rhs_dilation": (1, None)}, TypeError, "each element of rhs_dilation must be an int, got NoneType"),
        ({"padding": None}, TypeError, "padding must be 'SAME', 'VALID' or 2 pairs, got NoneType"),
        ({"padding": (1, 1)}, TypeError, "padding must be a sequence of ints, got int"),
        ({"padding": ((1.0, 0), (0, 0))}, TypeError, "each element of padding must be an int, got float"),
        ({"padding": ((1, 0, 0), (0, 0))}, ValueError, "padding must have 2 pairs"),
        ({"output_padding": 1.0}, TypeError, "output_padding must be a sequence of ints, got float"),
        ({"output_padding": None}, TypeError, "output_padding must be a sequence of ints, got NoneType"),
        ({"feature_group_count": None}, TypeError, "feature_group_count must be an int, got NoneType"),
        ({"feature_group_count": 1.0}, TypeError, "feature_group_count must be an int, got float"),
        ({"lhs": LAST[0]}, ValueError, "lhs and rhs must have the same rank"),
        ({"lhs": np.ones(3, np.float32), "rhs": np.ones(3, np.float32)}, ValueError, "rank of at least 2"),
    ],
    ids=str,
)
def test_conv_transpose(settings, error, message):
    arguments = {"lhs": LAST, "rhs": WINDOW, "strides": (2, 3), "padding": "SAME", **settings}
    with pytest.raises(error, match=rf"jaxgrad.conv_transpose: .*{message}"):
        jaxgrad.conv_transpose(**arguments)


def test_numpy_integers_are_ints():
    settings = {"rhs_dilation": np.array([1, 2]), "output_padding": np.int64(1), "feature_group_count": np.int32(1)}
    padding = ((np.int8(1), np.int64(0)), (0, np.uint8(1)))
    y = jaxgrad.conv_transpose(LAST, WINDOW, np.array([2, 3]), padding, **settings)
    plain = {"rhs_dilation": (1, 2), "output_padding": 1}
    expected = jaxgrad.conv_transpose(LAST, WINDOW, (2, 3), ((1, 0), (0, 1)), **plain)
    np.testing.assert_array_equal(y, expected)
    y = jaxgrad.conv_transpose(LAST, WINDOW, (2, 3), np.array([[1, 0], [0, 1]]), **plain)
    np.testing.assert_array_equal(y, expected)


def test_equal_arguments_of_other_types_are_checked_again():
    """1.0 and 1 are equal, and so would be the keys of kept readings."""
    jaxgrad.conv_general_dilated(X, W, (1, 1), ((1, 1), (1, 0)))
    with pytest.raises(ValueError, match="padding argument to conv_general_dilated"):
        jaxgrad.conv_general_dilated(X, W, (1, 1), ((1.0, 1), (1, 0)))


def test_strides_above_those_of_onednn_run_on_xla():
    arguments = X, W, (2**31, 1), ((1, 1), (1, 1))
    found = jaxgrad.explain(jaxgrad.conv_general_dilated, *arguments, platform="cpu")
    assert "xla" in {found.implementation, *(each.implementation for each in found.passes)}
    with pytest.raises(ValueError, match=r"cannot run: .*below 2\^31"):
        jaxgrad.conv_general_dilated(*arguments, implementation="onednn")


@pytest.mark.parametrize("groups", [0, -1, 4])
@pytest.mark.parametrize("transpose_kernel", [False, True])
def test_conv_transpose_groups(groups, transpose_kernel):
    with pytest.raises(ValueError, match="feature"):
        jaxgrad.conv_transpose(
            LAST, WINDOW, (2, 2), "SAME", feature_group_count=groups, transpose_kernel=transpose_kernel
        )


def test_conv_transpose_has_no_default_layout_for_four_spatial_axes():
    lhs, rhs = np.ones((1, 2, 2, 2, 2, 3), np.float32), np.ones((1, 1, 1, 1, 3, 4), np.float32)
    with pytest.raises(ValueError, match="dimension_numbers must be given for 4 spatial dimensions"):
        jaxgrad.conv_transpose(lhs, rhs, (1,) * 4, "SAME")
    settings = {"dimension_numbers": ("NTDHWC", "TDHWIO", "NTDHWC")}
    y = jaxgrad.conv_transpose(lhs, rhs, (2,) * 4, "SAME", **settings)
    np.testing.assert_allclose(y, lax.conv_transpose(lhs, rhs, (2,) * 4, "SAME", **settings))
