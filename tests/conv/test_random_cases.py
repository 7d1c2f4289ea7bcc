"""Random convolutions against `jax.lax` in float64: values and the gradients of every operand."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from backends import ONEDNN, XLA, Backend
from conv_cases import cotangent, make_conv_inputs, random_case
from conv_references import in_float64, lax_conv
from conv_running import assert_same, conv, run, terms
from thorough import thorough_after

import jaxgrad

DEFAULT = Backend(None, "cpu")
DTYPE_OF_SEED = ["float32"] * 5 + ["bfloat16", "bfloat16", "float16", "float64", "float32"]


def _check(case, dtype, backends):
    inputs = make_conv_inputs(case, dtype)
    plain = lax_conv(case)
    y = jax.eval_shape(plain, *inputs)
    dy = cotangent(y.shape, dtype, case.seed)
    expected = in_float64(plain, inputs, dy)
    for backend in backends:
        actual = run(conv(backend, **case.settings), inputs, dy)
        message = f"{backend} {dtype} {case}"
        assert_same(actual, expected, dtype=dtype, terms=terms(inputs, y), message=message)


@pytest.mark.parametrize("seed", thorough_after(14, range(150)))
def test_values_and_gradients(seed):
    """On the kernel if it supports the case, else on the default implementation."""
    case, dtype = random_case(seed), DTYPE_OF_SEED[seed % 10]
    inputs = make_conv_inputs(case, dtype)
    try:
        jaxgrad.explain(jaxgrad.conv_general_dilated, *inputs[:2], **case.settings, implementation="onednn")
    except ValueError:
        choice = jaxgrad.explain(jaxgrad.conv_general_dilated, *inputs[:2], **case.settings, platform="cpu")
        assert "xla" in {choice.implementation, *(found.implementation for found in choice.passes)}
        backends = [DEFAULT]
    else:
        backends = [ONEDNN, DEFAULT] if seed % 8 == 0 else [ONEDNN]
    if seed % 6 == 0 or (case.groups > 1 and seed % 2 == 0):
        backends.append(XLA)
    _check(case, dtype, backends)


@pytest.mark.gpu
@pytest.mark.parametrize("block", thorough_after(2, range(200)))
def test_with_the_defaults_of_users_on_a_gpu(block):
    """25 problems of a block: all implementations, searches and precisions as users get them, nothing forced."""
    wrong = []
    for seed in range(1000 + 25 * block, 1025 + 25 * block):
        case, dtype = random_case(seed), DTYPE_OF_SEED[seed % 10]
        if dtype == "float64" and not jax.config.jax_enable_x64:
            continue
        if seed % 2:  # enough features for tensor cores
            case = case.replace(features=8 * case.features, out_features=8 * case.out_features)
        try:
            _check_on_a_gpu(case, dtype, tf32=dtype == "float32" and seed % 4 < 2)
        except AssertionError as error:
            wrong.append(f"seed {seed}: {error}")
    assert not wrong, f"{len(wrong)} of 25 are wrong\n" + "\n".join(wrong)


def _check_on_a_gpu(case, dtype, *, tf32):
    inputs, plain = make_conv_inputs(case, dtype), lax_conv(case)
    y = jax.eval_shape(plain, *inputs)
    dy = cotangent(y.shape, dtype, case.seed)
    if tf32:  # operands that rounding to TF32 leaves alone
        inputs, dy = jax.tree.map(lambda a: a.astype(jnp.bfloat16).astype(a.dtype), (inputs, dy))
    expected = in_float64(plain, inputs, dy)
    with jax.default_matmul_precision(None if tf32 else "highest"):
        actual = run(conv(Backend(None, "gpu"), **case.settings), inputs, dy)
    message = f"{dtype}{' in TF32' * tf32} {case}"
    if not tf32:
        assert_same(actual, expected, dtype=dtype, terms=terms(inputs, y), message=message)
        return
    for name, found, desired in zip(actual._fields, actual, expected, strict=True):
        if found is not None:  # cuDNN may round the operands of Winograd's products
            atol = 2.0**-8 * max(1, np.abs(desired).max(initial=0))
            np.testing.assert_allclose(found, desired, rtol=0, atol=atol, err_msg=f"{name} of {message}")


def test_random_cases_cover_every_setting():
    """Guards against changes of the random cases that would reduce their coverage."""
    cases = [random_case(seed) for seed in range(150)]
    pairs = [p for case in cases if not isinstance(case.padding, str) for p in case.padding]
    found = {
        "1, 2 and 3 spatial axes": min(sum(case.n == n for case in cases) for n in (1, 2, 3)),
        "groups": sum(case.groups > 1 and case.features > 1 for case in cases),
        "depthwise with a multiplier": sum(
            case.groups > 1 and case.features == 1 and case.out_features > 1 for case in cases
        ),
        "no layout": sum(case.layout is None for case in cases),
        "layout as an object": sum(case.as_object for case in cases),
        "input dilation": sum(case.lhs_dilation is not None and case.strides is None for case in cases),
        "input dilation with strides": sum(None not in (case.lhs_dilation, case.strides) for case in cases),
        "window dilation": sum(case.rhs_dilation is not None for case in cases),
        "named padding": min(sum(case.padding == name for case in cases) for name in ("SAME", "SAME_LOWER", "VALID")),
        "padding at one end": sum(low != high for low, high in pairs),
        "negative padding": sum(min(p) < 0 for p in pairs),
        "padding beyond the window": sum(max(p) > 4 for p in pairs),
        "one row": sum(case.batch == 1 for case in cases),
        "no bias": sum(not case.bias for case in cases),
    }
    assert min(found.values()) >= 5, found
    assert np.mean([case.features != case.out_features for case in cases]) > 0.7
