"""Convolutions that are matrix products: windows that cover all of x, and transposed convolutions of one position."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from backends import CONVOLUTION, Backend
from conv_cases import FIELDS, ConvCase, cotangent, layout, make_conv_inputs
from conv_references import in_float64, lax_conv
from conv_running import assert_same, calls, conv, conv_transpose, run, terms
from conv_transpose_cases import TransposeCase, lax_conv_transpose, make_transpose_inputs
from thorough import one_in

import jaxgrad
from jaxgrad._src.conv.on_xla.forms import MATRIX_PRODUCT
from jaxgrad._src.native import cuda

BACKENDS = (Backend(None, "cpu"), Backend(None, "gpu"), *CONVOLUTION)

SIZES = {"batch": 5, "features": 3, "out_features": 4}
ONES = {1: (1,), 2: (1, 1), 3: (1, 1, 1)}
WINDOWS = {1: (6,), 2: (2, 5), 3: (3, 1, 2)}


def _covering(n, kind):
    rng = np.random.default_rng(10 + n)
    return ConvCase(spatial=WINDOWS[n], window=WINDOWS[n], layout=layout(kind, n, rng), **SIZES)


def _spreading(n, kind, **changes):
    rng = np.random.default_rng(10 + n)
    window = {"window": WINDOWS[n], "padding": "VALID", "layout": layout(kind, n, rng)}
    return TransposeCase(**{**SIZES, "spatial": ONES[n], "strides": ONES[n], **window, **changes})


CASES = {
    **{f"covering_{n}_{kind}": _covering(n, kind) for n in WINDOWS for kind in ("first", "last", "permuted")},
    "covering_a_line_dilated": _covering(2, "last").replace(spatial=(1, 5), window=(1, 5), rhs_dilation=(3, 1)),
    "covering_strided": _covering(2, "last").replace(strides=(2, 3)),
    **{f"spreading_{n}_{kind}": _spreading(n, kind) for n in WINDOWS for kind in ("first", "last", "permuted")},
    "spreading_strided": _spreading(2, "last", strides=(2, 5)),
    "spreading_padded": _spreading(2, "last", padding=((2, 1), (4, 6))),
    "spreading_swapped": _spreading(2, "last", transpose_kernel=True),
}
NEAR_PRODUCTS = {
    "padded": _covering(2, "last").replace(padding=((0, 1), (0, 0))),
    "larger": _covering(2, "last").replace(spatial=(3, 5)),
    "dilated": _covering(2, "last").replace(spatial=(3, 9), rhs_dilation=(2, 2)),
    "groups": _covering(2, "last").replace(groups=2),
    "of_several": _spreading(2, "last", spatial=(1, 2)),
    "cropped": _spreading(2, "last", padding=((1, 0), (4, 4))),
    "same": _spreading(2, "last", padding="SAME"),
}


def _op(backend, case):
    return (conv_transpose if isinstance(case, TransposeCase) else conv)(backend, **case.settings)


def _reference(case):
    return (lax_conv_transpose if isinstance(case, TransposeCase) else lax_conv)(case)


def _inputs(case, dtype="float32"):
    return (make_transpose_inputs if isinstance(case, TransposeCase) else make_conv_inputs)(case, dtype)


def _check(backend, case, dtype):
    inputs = _inputs(case, dtype)
    y = jax.eval_shape(_reference(case), *inputs)
    dy = cotangent(y.shape, dtype)
    expected = in_float64(_reference(case), inputs, dy)
    found = run(_op(backend, case), backend.put(inputs), backend.put(dy))
    assert_same(found, expected, dtype=dtype, terms=terms(inputs, y), message=f"{backend} {case}")


@pytest.mark.parametrize("name", one_in(2, CASES))
def test_values_and_gradients(backend, name):
    _check(backend, CASES[name], "float32")


@pytest.mark.parametrize("dtype", ["float64", "bfloat16", "float16"])
@pytest.mark.parametrize("name", ["covering_2_last", "spreading_2_first"])
def test_dtypes(backend, name, dtype):
    if backend.implementation == "onednn" and dtype == "float64":
        pytest.skip("oneDNN has no float64")
    _check(backend, CASES[name], dtype)


@pytest.mark.parametrize("name", NEAR_PRODUCTS)
def test_near_matrix_products_match_the_reference(backend, name):
    _check(backend, NEAR_PRODUCTS[name], "float32")


def _shapes(case):
    return [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in _inputs(case)]


def _explained(case, platform):
    op = jaxgrad.conv_transpose if isinstance(case, TransposeCase) else jaxgrad.conv_general_dilated
    lhs, rhs, bias = _shapes(case)
    return jaxgrad.explain(op, lhs, rhs, bias=bias, platform=platform, **case.settings)


def _lowered(function, platform, *args):
    return jax.jit(function).trace(*args).lower(lowering_platforms=(platform,)).as_text()


def _all_passes(op):
    def both(dy, *inputs):
        y, pullback = jax.vjp(op, *inputs)
        return y, pullback(dy)

    return both


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
@pytest.mark.parametrize("name", CASES)
def test_every_pass_is_a_matrix_product(name, platform):
    case = CASES[name]
    choice = _explained(case, platform)
    assert (choice.implementation, choice.passes) == ("xla", ())
    if platform == "cpu" or cuda.targets():  # a CPU-only build reports that it has no GPU kernels
        assert choice.reason == MATRIX_PRODUCT
    op = _op(Backend(None, platform), case)
    lhs, rhs, bias = _shapes(case)
    dy = jax.eval_shape(op, lhs, rhs, bias)
    text = _lowered(_all_passes(op), "cuda" if platform == "gpu" else platform, dy, lhs, rhs, bias)
    assert "stablehlo.convolution" not in text
    assert not any(calls(text).values())
    assert text.count("stablehlo.dot_general") == 3


@pytest.mark.parametrize("name", NEAR_PRODUCTS)
def test_near_matrix_products_are_not_matrix_products(name):
    assert MATRIX_PRODUCT not in str(_explained(NEAR_PRODUCTS[name], "cpu"))


@pytest.mark.parametrize("mapped", [("lhs",), ("rhs",), ("lhs", "rhs", "bias")], ids="-".join)
@pytest.mark.parametrize("name", ["covering_2_last", "spreading_2_last", "spreading_3_permuted"])
def test_independent_problems_are_matrix_products(backend, name, mapped):
    case = CASES[name]
    op = _op(backend, case)
    drawn = [_inputs(case.replace(seed=seed)) for seed in range(3)]
    inputs = drawn[0]._replace(**{field: np.stack([getattr(one, field) for one in drawn]) for field in mapped})
    axes = tuple(0 if field in mapped else None for field in FIELDS)

    def results(*inputs):
        y, pullback = jax.vjp(op, *inputs)
        return y, pullback(jnp.cos(y))

    found = jax.jit(jax.vmap(results, in_axes=axes))(*backend.put(tuple(inputs)))
    for i, own in enumerate(drawn):
        one = [getattr(own if field in mapped else drawn[0], field) for field in FIELDS]
        expected = results(*backend.put(tuple(one)))
        jax.tree.map(partial(_close, i), found, expected)
    if backend.implementation is None:
        compiled = jax.jit(jax.vmap(results, in_axes=axes)).lower(*inputs).compile()
        assert "convolution(" not in compiled.as_text()


def _close(i, found, expected):
    tolerance = 2e-5 if jax.default_backend() == "cpu" else 2e-3  # TF32
    np.testing.assert_allclose(found[i], expected, rtol=0, atol=tolerance * max(1.0, np.abs(expected).max()))
