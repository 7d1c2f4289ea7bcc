"""relu in the convolutions: values, NaN, gradients to the second order, what is kept for them, and what is told."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conv_cases import FIELDS, ConvCase, ConvInputs, cotangent, make_conv_inputs
from conv_references import in_float64, lax_conv
from conv_running import assert_same, compiled_calls, conv, conv_transpose, run, terms
from conv_transpose_cases import TransposeCase, lax_conv_transpose, make_transpose_inputs
from targets import CONVOLUTION, CPU_KERNEL

import jaxgrad

TARGETS = CONVOLUTION

LAST, VOLUME = ("NHWC", "HWIO", "NHWC"), ("NDHWC", "DHWIO", "NDHWC")
LOPSIDED = ConvCase(spatial=(9, 8), features=8, out_features=16, padding=((2, 0), (0, 1)), layout=LAST)
CASES = {
    "lopsided": LOPSIDED,
    "first": LOPSIDED.replace(layout=None, strides=(2, 1)),
    "volume": ConvCase(spatial=(5, 6, 4), window=(3, 3, 3), features=8, out_features=16, padding="SAME", layout=VOLUME),
    "one axis": ConvCase(
        spatial=(40,), window=(2,), features=8, out_features=8, rhs_dilation=(4,), padding=((4, 0),), layout=None
    ),
    "groups": ConvCase(spatial=(6, 7), groups=2, strides=(2, 1), padding="SAME", layout=LAST),
    "no bias": LOPSIDED.replace(bias=False),
    "transposed": TransposeCase(spatial=(4, 5), strides=(2, 1)),
}
DTYPES = ["float32", "bfloat16", "float16", "float64"]
EVERY = [*((name, "float32") for name in CASES), *(("lopsided", dtype) for dtype in DTYPES[1:])]


def _parts(target, case, dtype="float32"):
    """The op, the same without its relu in plain JAX, and inputs."""
    transposed = isinstance(case, TransposeCase)
    op = (conv_transpose if transposed else conv)(target, **case.settings, activation="relu")
    plain, make = (lax_conv_transpose, make_transpose_inputs) if transposed else (lax_conv, make_conv_inputs)
    return op, plain(case), make(case, dtype)


def _with_relu(plain):
    return lambda *inputs: jax.nn.relu(plain(*inputs))


@pytest.mark.parametrize(("name", "dtype"), EVERY)
def test_values_and_gradients(target, name, dtype):
    if target == CPU_KERNEL and dtype == "float64":
        pytest.skip("oneDNN has no float64")
    op, plain, inputs = _parts(target, CASES[name], dtype)
    dy = cotangent(jax.eval_shape(op, *inputs).shape, dtype)
    actual = run(op, inputs, dy)
    assert 0.2 < np.mean(actual.y > 0) < 0.8
    # A sum near zero may be rounded to either side of it: the gradients are those of dy where this y is not zero.
    expected = in_float64(plain, inputs, np.where(actual.y > 0, dy, 0))
    expected = expected._replace(y=np.maximum(expected.y, 0))
    assert_same(actual, expected, dtype=dtype, terms=terms(inputs, dy))


@pytest.mark.parametrize("dtype", DTYPES[:3])
@pytest.mark.parametrize("name", ["lopsided", "first", "volume", "one axis", "no bias", "transposed"])
def test_what_is_not_finite(target, name, dtype):
    """NaN stays NaN, and passes no gradient on, as in `jax.nn.relu`; so do the infinities, in their own way."""
    op, plain, inputs = _parts(target, CASES[name], dtype)
    lhs = np.array(inputs.lhs)
    lhs.reshape(-1)[[3, lhs.size // 2, -5]] = np.nan, np.inf, -np.inf
    bias = None if inputs.bias is None else np.array(inputs.bias)
    if bias is not None:
        bias[2] = np.nan
    inputs = inputs._replace(lhs=lhs, bias=bias)
    placed = ConvInputs(*target.put(tuple(inputs)))
    y, pullback = jax.vjp(jax.jit(op), *placed)
    with jax.default_device(jax.devices("cpu")[0]):
        expected = _with_relu(plain)(*(None if a is None else np.asarray(a, np.float64) for a in inputs))
    for what in (np.isnan, np.isposinf):
        np.testing.assert_array_equal(what(np.asarray(y, np.float64)), what(expected))
    assert np.isnan(expected).any()
    assert np.isposinf(expected).any()
    assert (expected == 0).any()
    if bias is not None:
        axes = tuple(axis for axis in range(y.ndim) if axis != CASES[name].numbers.out_spec[1])
        np.testing.assert_array_equal(pullback(jnp.ones_like(y))[2], np.sum(np.asarray(y, np.float64) > 0, axes))


def test_at_zero_the_gradient_is_zero(target):
    op, _, inputs = _parts(target, LOPSIDED)
    zeros = jax.tree.map(np.zeros_like, inputs)
    y, *gradients = run(op, zeros, np.ones(jax.eval_shape(op, *inputs).shape, np.float32))
    assert not np.any(y)
    assert not any(map(np.any, gradients))


@pytest.mark.parametrize("wanted", [("lhs",), ("bias",), FIELDS], ids="-".join)
def test_the_program_holds_only_what_is_asked_for(wanted):
    """And one forward call: the gradient reads its result."""
    op, _, inputs = _parts(CPU_KERNEL, CASES["first"])
    dy = cotangent(jax.eval_shape(op, *inputs).shape, "float32")
    gradient = jax.grad(lambda given: jnp.vdot(op(*inputs._replace(**given)), dy))
    found = compiled_calls(gradient, {name: getattr(inputs, name) for name in wanted})
    assert found == (1, int("lhs" in wanted), int("rhs" in wanted))


def test_the_result_is_all_that_is_kept_beside_the_operands():
    op, _, inputs = _parts(CPU_KERNEL, LOPSIDED)
    y, pullback = jax.vjp(op, *inputs)
    kept = [leaf for leaf in jax.tree.leaves(pullback) if leaf.ndim > 1]
    assert sorted(a.shape for a in kept) == sorted(a.shape for a in (*inputs[:2], y))
    assert all(a.dtype == y.dtype for a in kept)


@pytest.mark.parametrize("name", ["first", "groups", "transposed"])
def test_gradients_of_a_gradient_penalty(target, name):
    op, plain, inputs = _parts(target, CASES[name])

    def penalty(op, inputs):
        gradients = jax.grad(lambda inputs: jnp.sum(jnp.sin(op(*inputs))))(inputs)
        return sum(jnp.vdot(g, g) for g in gradients)

    with jax.default_device(jax.devices("cpu")[0]):
        wide = tuple(np.asarray(a, np.float64) for a in inputs)
        expected = jax.jit(jax.grad(partial(penalty, _with_relu(plain))))(wide)
    actual = jax.jit(jax.grad(partial(penalty, op)))(target.put(tuple(inputs)))
    for found, wanted in zip(actual, expected, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-5 * np.abs(wanted).max())


@pytest.mark.parametrize("names", [("lhs",), ("rhs", "bias"), FIELDS], ids="-".join)
@pytest.mark.parametrize("name", ["first", "groups"])
def test_vmap(target, name, names):
    case = CASES[name]
    op, _, inputs = _parts(target, case)
    drawn = [make_conv_inputs(case.replace(seed=seed)) for seed in range(3)]
    stacked = inputs._replace(**{field: np.stack([getattr(one, field) for one in drawn]) for field in names})
    in_axes = tuple(0 if field in names else None for field in FIELDS)

    def results(*inputs):
        return jax.value_and_grad(lambda inputs: jnp.sum(jnp.sin(op(*inputs))))(inputs)

    stacked = target.put(tuple(stacked))
    mapped, single = jax.jit(jax.vmap(results, in_axes)), jax.jit(results)
    found = mapped(*stacked)
    for i in range(3):
        one = single(*(a if axis is None else a[i] for a, axis in zip(stacked, in_axes, strict=True)))
        jax.tree.map(lambda a, b, i=i: np.testing.assert_allclose(a[i], b, rtol=1e-5, atol=1e-4), found, one)


def test_explain_tells_where_the_relu_is_computed():
    inputs, up = make_conv_inputs(LOPSIDED), make_transpose_inputs(CASES["transposed"])
    with_relu = {"activation": "relu", "platform": "cpu"}
    choice = jaxgrad.explain(jaxgrad.conv_general_dilated, *inputs[:2], **LOPSIDED.settings, **with_relu)
    assert choice.reason == "oneDNN; relu is XLA's"
    settings = CASES["transposed"].settings
    choice = jaxgrad.explain(jaxgrad.conv_transpose, *up[:2], **settings, **with_relu, implementation="cpu")
    assert choice.reason == "forced by implementation='cpu'; relu is XLA's"
    without = jaxgrad.explain(jaxgrad.conv_general_dilated, *inputs[:2], **LOPSIDED.settings, platform="cpu")
    assert without.reason == "oneDNN"
