"""Transposed convolutions against `jax.lax.conv_transpose`, and against the gradient of a convolution."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from backends import CONVOLUTION, ONEDNN, XLA, Backend
from conv_cases import cotangent
from conv_references import in_float64, with_bias
from conv_running import assert_same, conv_transpose, run, terms
from conv_transpose_cases import (
    TransposeCase,
    lax_conv_transpose,
    make_transpose_inputs,
    random_transpose_case,
    result_shape,
)
from jax import lax
from thorough import thorough_after

import jaxgrad

BACKENDS = CONVOLUTION

DEFAULT = Backend(None, "cpu")
DTYPE_OF_SEED = ["float32"] * 5 + ["bfloat16", "bfloat16", "float16", "float64", "float32"]


def _check(case, dtype, backends, reference):
    inputs = make_transpose_inputs(case, dtype)
    y = jax.eval_shape(reference, *inputs)
    dy = cotangent(y.shape, dtype, case.seed)
    expected = in_float64(reference, inputs, dy)
    for backend in backends:
        actual = run(conv_transpose(backend, **case.settings), inputs, dy)
        assert_same(actual, expected, dtype=dtype, terms=terms(inputs, y), message=f"{backend} {dtype} {case}")


def _backends(case, dtype):
    inputs = make_transpose_inputs(case, dtype)
    try:
        jaxgrad.explain(jaxgrad.conv_transpose, *inputs[:2], **case.settings, implementation="onednn")
    except ValueError:
        choice = jaxgrad.explain(jaxgrad.conv_transpose, *inputs[:2], **case.settings, platform="cpu")
        assert "xla" in {choice.implementation, *(found.implementation for found in choice.passes)}
        return [DEFAULT]
    return [ONEDNN]


@pytest.mark.parametrize("seed", thorough_after(12, range(100)))
def test_values_and_gradients(seed):
    case, dtype = random_transpose_case(seed), DTYPE_OF_SEED[seed % 10]
    backends = _backends(case, dtype)
    if seed % 6 == 0 or (case.groups > 1 and seed % 2 == 0):
        backends += [XLA, DEFAULT] if seed % 12 == 0 else [XLA]
    _check(case, dtype, backends, lax_conv_transpose(case))


def test_random_cases_cover_every_setting():
    cases = [random_transpose_case(seed) for seed in range(100)]
    found = {
        "1, 2 and 3 spatial axes": min(sum(case.n == n for case in cases) for n in (1, 2, 3)),
        "groups": sum(case.groups > 1 for case in cases),
        "groups of a transposed kernel": sum(case.groups > 1 and case.transpose_kernel for case in cases),
        "no layout": sum(case.layout is None for case in cases),
        "unit strides": sum(set(case.strides) == {1} for case in cases),
        "window dilation": sum(case.rhs_dilation is not None for case in cases),
        "named padding": min(sum(case.padding == name for case in cases) for name in ("SAME", "VALID")),
        "consistent pairs": sum(case.use_consistent_padding and not isinstance(case.padding, str) for case in cases),
        "output padding": sum(bool(np.any(case.output_padding)) for case in cases),
    }
    assert min(found.values()) >= 4, found


@pytest.mark.parametrize(
    ("padding", "consistent"),
    [("SAME", False), ("VALID", False), ("SAME", True), (((1, 2), (0, 3)), False), (((1, 0), (-1, 1)), True)],
    ids=str,
)
@pytest.mark.parametrize("stride", [1, 2, 4])
@pytest.mark.parametrize("window", [1, 2, 3])
def test_every_padding_matches_lax(padding, consistent, stride, window):
    """Strides smaller than, equal to and larger than the window."""
    case = TransposeCase(
        window=(window, 3), strides=(stride, 2), padding=padding, use_consistent_padding=consistent, bias=False
    )
    inputs = make_transpose_inputs(case)
    expected = lax.conv_transpose(*inputs[:2], **case.lax_settings)
    for backend in (ONEDNN, XLA):
        actual = conv_transpose(backend, **case.settings)(*inputs)
        np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-5)


def _gradient_of_conv(case: TransposeCase):
    """The transpose with respect to x of the convolution of x whose result has the shape of lhs."""
    numbers, strides = case.numbers, case.strides
    dilation = case.rhs_dilation or (1,) * case.n

    def op(lhs, rhs):
        def forward(x):
            return lax.conv_general_dilated(
                x,
                rhs,
                strides,
                case.padding,
                rhs_dilation=dilation,
                dimension_numbers=lax.ConvDimensionNumbers(numbers.out_spec, numbers.rhs_spec, numbers.lhs_spec),
                feature_group_count=case.groups,
            )

        x = jax.ShapeDtypeStruct(result_shape(case), lhs.dtype)
        return jax.linear_transpose(forward, x)(lhs)[0]

    return with_bias(op, numbers.out_spec[1])


@pytest.mark.parametrize("layout", [None, ("NCHW", "OIHW", "NCHW"), ("HNCW", "IWOH", "CNWH")], ids=str)
@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("output_padding", thorough_after(2, [(0, 0), (1, 2), (0, 1)]), ids=str)
def test_matches_the_gradient_of_a_convolution(backend, layout, groups, output_padding):
    case = TransposeCase(
        strides=(2, 3),
        padding=((1, 0), (0, 1)),
        rhs_dilation=(1, 2),
        layout=layout,
        groups=groups,
        transpose_kernel=True,
        use_consistent_padding=True,
        output_padding=output_padding,
    )
    inputs = backend.put(make_transpose_inputs(case))
    _check(case, "float32", [backend], _gradient_of_conv(case))
    y = conv_transpose(backend, **case.settings)(*inputs)
    assert y.shape == result_shape(case)


@pytest.mark.parametrize("padding", ["SAME", "VALID"])
def test_output_padding_adds_rows_at_the_high_end(backend, padding):
    case = TransposeCase(strides=(2, 3), window=(4, 5), padding=padding)
    inputs = backend.put(make_transpose_inputs(case))
    plain = conv_transpose(backend, **case.settings)(*inputs)
    more = conv_transpose(backend, **case.replace(output_padding=(1, 2)).settings)(*inputs)
    assert more.shape == (2, plain.shape[1] + 1, plain.shape[2] + 2, 5)
    np.testing.assert_allclose(more[:, : plain.shape[1], : plain.shape[2]], plain, rtol=0, atol=1e-5)
    assert np.abs(np.asarray(more[:, -1] - inputs.bias)).max() > (0.1 if padding == "SAME" else -1)


def test_scalar_output_padding_applies_to_every_axis(backend):
    case = TransposeCase(strides=(2, 3), window=(4, 5))
    inputs = backend.put(make_transpose_inputs(case))
    one, each = (
        conv_transpose(backend, **case.replace(output_padding=value).settings)(*inputs) for value in (1, (1, 1))
    )
    np.testing.assert_array_equal(one, each)


def test_same_lower_with_unit_strides():
    """`jax.lax` accepts SAME_LOWER only with unit strides."""
    case = TransposeCase(padding="SAME_LOWER", window=(2, 4), bias=False)
    inputs = make_transpose_inputs(case)
    expected = lax.conv_transpose(*inputs[:2], **case.lax_settings)
    np.testing.assert_allclose(jaxgrad.conv_transpose(*inputs[:2], **case.settings), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("n", [0, 1, 2, 3])
def test_the_default_layout_is_channels_last(n):
    case = TransposeCase(spatial=(5, 3, 4)[:n], window=(2, 3, 2)[:n], strides=(2, 1, 3)[:n])
    inputs = make_transpose_inputs(case)
    expected = lax.conv_transpose(*inputs[:2], case.strides, "SAME") + inputs.bias
    actual = jaxgrad.conv_transpose(*inputs[:2], case.strides, "SAME", bias=inputs.bias)
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-5)


def test_weight_gradient_on_xla_is_that_of_a_strided_convolution():
    """JAX writes it with input dilation, for which XLA has no fast kernel."""
    x, w = (jax.ShapeDtypeStruct(shape, "float64") for shape in ((2, 5, 7, 3), (4, 4, 3, 6)))
    op = partial(jaxgrad.conv_transpose, strides=(2, 3), padding="SAME", implementation="xla")
    gradient = jax.jit(lambda x, w: jax.grad(lambda w: jnp.sum(jnp.sin(op(x, w))))(w))
    text = gradient.trace(x, w).lower(lowering_platforms=("cpu",)).as_text()
    assert text.count("stablehlo.convolution") == 2
    assert text.count("rhs_dilate = [2, 3]") == 1
