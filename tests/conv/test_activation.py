"""relu fused into the convolutions: values, NaN, residuals, derivatives to second order, and `explain`."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from backends import CONVOLUTION, ONEDNN, XLA_ON_GPU
from conv_cases import FIELDS, ConvCase, cotangent, make_conv_inputs
from conv_references import in_float64, lax_conv
from conv_running import assert_same, compiled_calls, conv, conv_transpose, run, terms
from conv_transpose_cases import TransposeCase, lax_conv_transpose, make_transpose_inputs

import jaxgrad

BACKENDS = CONVOLUTION

LAST, VOLUME = ("NHWC", "HWIO", "NHWC"), ("NDHWC", "DHWIO", "NDHWC")
LOPSIDED = ConvCase(spatial=(9, 8), features=8, out_features=16, padding=((2, 0), (0, 1)), layout=LAST)
CASES = {
    "lopsided": LOPSIDED,
    "volume": ConvCase(spatial=(5, 6, 4), window=(3, 3, 3), features=8, out_features=16, padding="SAME", layout=VOLUME),
    "one axis": ConvCase(
        spatial=(40,), window=(2,), features=8, out_features=8, rhs_dilation=(4,), padding=((4, 0),), layout=None
    ),
    "groups": ConvCase(spatial=(6, 7), groups=2, strides=(2, 1), padding="SAME", layout=LAST),
    "no bias": LOPSIDED.replace(bias=False),
    "transposed": TransposeCase(spatial=(4, 5), strides=(2, 1)),
}
DTYPES = ["float32", "bfloat16", "float16", "float64"]
NOT_FINITE = [
    *((name, "float32") for name in ("lopsided", "one axis", "transposed")),
    *((name, dtype) for name in ("lopsided", "volume") for dtype in DTYPES[1:3]),
]
FINITE = [*((name, "float32") for name in CASES), *(("lopsided", dtype) for dtype in DTYPES[1:])]


def _parts(backend, case, dtype="float32"):
    """The op with relu, the reference without relu in plain JAX, and inputs."""
    transposed = isinstance(case, TransposeCase)
    op = (conv_transpose if transposed else conv)(backend, **case.settings, activation="relu")
    plain, make = (lax_conv_transpose, make_transpose_inputs) if transposed else (lax_conv, make_conv_inputs)
    return op, plain(case), make(case, dtype)


def _jit(function):
    return jax.jit(function, compiler_options={"xla_backend_optimization_level": 0})


def _with_relu(plain):
    return lambda *inputs: jax.nn.relu(plain(*inputs))


@pytest.mark.parametrize(("name", "dtype"), FINITE)
def test_values_and_gradients(backend, name, dtype):
    if backend == ONEDNN and dtype == "float64":
        pytest.skip("oneDNN has no float64")
    op, plain, inputs = _parts(backend, CASES[name], dtype)
    dy = cotangent(jax.eval_shape(op, *inputs).shape, dtype)
    actual = run(op, inputs, dy)
    assert 0.2 < np.mean(actual.y > 0) < 0.8
    # Rounding decides the sign of a sum near zero; the reference uses the relu mask of the actual y.
    expected = in_float64(plain, inputs, np.where(actual.y > 0, dy, 0))
    expected = expected._replace(y=np.maximum(expected.y, 0))
    assert_same(actual, expected, dtype=dtype, terms=terms(inputs, dy))


@pytest.mark.parametrize(("name", "dtype"), NOT_FINITE)
def test_nonfinite_values(backend, name, dtype):
    """NaN and infinities in y and in the gradients, as in `jax.nn.relu`."""
    op, plain, inputs = _parts(backend, CASES[name], dtype)
    lhs = np.array(inputs.lhs)
    lhs.reshape(-1)[[3, lhs.size // 2, -5]] = np.nan, np.inf, -np.inf
    bias = np.array(inputs.bias)
    bias[2] = np.nan
    inputs = inputs._replace(lhs=lhs, bias=bias)
    actual = run(op, inputs, np.ones(jax.eval_shape(op, *inputs).shape, lhs.dtype))
    with jax.default_device(jax.devices("cpu")[0]):
        expected = _with_relu(plain)(*(np.asarray(a, np.float64) for a in inputs))
    y = actual.y.astype(np.float64)
    if backend == XLA_ON_GPU:  # some of its kernels spread NaN within a tile
        assert np.isnan(y)[np.isnan(expected)].all()
        return
    for what in (np.isnan, np.isposinf):
        np.testing.assert_array_equal(what(y), what(expected))
    assert np.isnan(expected).any()
    assert np.isposinf(expected).any()
    assert (expected == 0).any()
    axes = tuple(axis for axis in range(expected.ndim) if axis != CASES[name].numbers.out_spec[1])
    np.testing.assert_array_equal(actual.bias, np.sum(y > 0, axes))


def test_relu_gradient_at_zero_is_zero(backend):
    op, _, inputs = _parts(backend, LOPSIDED)
    zeros = jax.tree.map(np.zeros_like, inputs)
    y, *gradients = run(op, zeros, np.ones(jax.eval_shape(op, *inputs).shape, np.float32))
    assert not np.any(y)
    assert not any(map(np.any, gradients))


@pytest.mark.parametrize("requested", [("lhs",), ("bias",), FIELDS], ids="-".join)
def test_program_holds_only_the_requested_gradients(requested):
    """And one forward call, whose result the relu mask reads."""
    op, _, inputs = _parts(ONEDNN, LOPSIDED)
    dy = cotangent(jax.eval_shape(op, *inputs).shape, "float32")
    gradient = jax.grad(lambda given: jnp.vdot(op(*inputs._replace(**given)), dy))
    found = compiled_calls(gradient, {name: getattr(inputs, name) for name in requested})
    assert found == (1, int("lhs" in requested), int("rhs" in requested))


def test_residuals_are_the_operands_and_the_result():
    op, _, inputs = _parts(ONEDNN, LOPSIDED)
    y, pullback = jax.vjp(op, *inputs)
    kept = [leaf for leaf in jax.tree.leaves(pullback) if leaf.ndim > 1]
    assert sorted(a.shape for a in kept) == sorted(a.shape for a in (*inputs[:2], y))
    assert all(a.dtype == y.dtype for a in kept)


def test_gradients_of_a_gradient_penalty(backend):
    op, plain, inputs = _parts(backend, CASES["groups"])

    def penalty(op, inputs):
        gradients = jax.grad(lambda inputs: jnp.sum(jnp.sin(op(*inputs))))(inputs)
        return sum(jnp.vdot(g, g) for g in gradients)

    with jax.default_device(jax.devices("cpu")[0]):
        wide = tuple(np.asarray(a, np.float64) for a in inputs)
        expected = _jit(jax.grad(partial(penalty, _with_relu(plain))))(wide)
    actual = _jit(jax.grad(partial(penalty, op)))(backend.put(tuple(inputs)))
    for found, desired in zip(actual, expected, strict=True):
        np.testing.assert_allclose(found, desired, rtol=0, atol=1e-5 * np.abs(desired).max())


def test_forward_mode_of_a_transposed_convolution(backend):
    """The tangent of a gradient: forward over reverse."""
    op, plain, inputs = _parts(backend, CASES["transposed"])
    directions = tuple(np.cos(a) for a in inputs)

    def slope(op, *inputs):
        return jax.grad(lambda inputs: jnp.sum(jnp.sin(op(*inputs))))(inputs)

    with jax.default_device(jax.devices("cpu")[0]):
        wide = [tuple(np.asarray(a, np.float64) for a in arrays) for arrays in (inputs, directions)]
        expected = _jit(partial(jax.jvp, partial(slope, _with_relu(plain))))(*wide)
    with jaxgrad.forward_mode():
        found = _jit(partial(jax.jvp, partial(slope, op)))(backend.put(tuple(inputs)), backend.put(directions))
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * np.abs(b).max())


@pytest.mark.parametrize("names", [("lhs",), ("rhs", "bias"), FIELDS], ids="-".join)
def test_vmap(backend, names):
    case = CASES["groups"]
    op, _, inputs = _parts(backend, case)
    drawn = [make_conv_inputs(case.replace(seed=seed)) for seed in range(3)]
    stacked = inputs._replace(**{field: np.stack([getattr(one, field) for one in drawn]) for field in names})
    in_axes = tuple(0 if field in names else None for field in FIELDS)

    def results(*inputs):
        return jax.value_and_grad(lambda inputs: jnp.sum(jnp.sin(op(*inputs))))(inputs)

    stacked = backend.put(tuple(stacked))
    single = _jit(results)
    found = _jit(jax.vmap(results, in_axes))(*stacked)
    for i in range(3):
        one = single(*(a if axis is None else a[i] for a, axis in zip(stacked, in_axes, strict=True)))
        jax.tree.map(lambda a, b, i=i: np.testing.assert_allclose(a[i], b, rtol=1e-5, atol=1e-4), found, one)


def test_explain_reports_where_relu_runs():
    inputs, up = make_conv_inputs(LOPSIDED), make_transpose_inputs(CASES["transposed"])
    with_relu = {"activation": "relu", "platform": "cpu"}
    choice = jaxgrad.explain(jaxgrad.conv_general_dilated, *inputs[:2], **LOPSIDED.settings, **with_relu)
    assert choice.reason == "oneDNN; XLA applies relu"
    settings = CASES["transposed"].settings
    choice = jaxgrad.explain(jaxgrad.conv_transpose, *up[:2], **settings, **with_relu, implementation="onednn")
    assert choice.reason == "forced by implementation='onednn'; XLA applies relu"
    without = jaxgrad.explain(jaxgrad.conv_general_dilated, *inputs[:2], **LOPSIDED.settings, platform="cpu")
    assert without.reason == "oneDNN"
