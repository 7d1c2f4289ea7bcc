"""The ops take the place of `jax.lax.conv_general_dilated` and `jax.lax.conv_transpose`, also under their names."""

from __future__ import annotations

import inspect
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from backends import CONVOLUTION
from thorough import oldest_one_in
from tolerances import assert_close

import jaxgrad

pytestmark = pytest.mark.jax_version

BACKENDS = CONVOLUTION
NAMES = ("conv_general_dilated", "conv_transpose")
OF_LAX = {name: getattr(jax.lax, name) for name in NAMES}
NHWC = ("NHWC", "HWIO", "NHWC")


@pytest.mark.parametrize("name", NAMES)
def test_the_arguments_of_lax(name):
    """Names, order, kinds and defaults; additional arguments are keyword-only."""
    of_lax = list(inspect.signature(OF_LAX[name]).parameters.values())
    found = list(inspect.signature(getattr(jaxgrad, name)).parameters.values())
    described = [[(p.name, p.kind, p.default) for p in given] for given in (found[: len(of_lax)], of_lax)]
    assert described[0] == described[1]
    assert all(p.kind is p.KEYWORD_ONLY for p in found[len(of_lax) :])


# name of the function, shapes of lhs and rhs, arguments by position, arguments by keyword
KERNEL_CASES = {
    "strides": (NAMES[0], (2, 3, 7, 6), (4, 3, 3, 2), ((2, 1), "SAME"), {}),
    "dilation": (NAMES[0], (2, 3, 7, 6), (4, 3, 3, 2), ((1, 1), ((2, 0), (-1, 2)), None, (1, 2)), {}),
    "input dilation": (NAMES[0], (2, 5, 4, 3), (3, 2, 3, 4), ((1, 1), ((1, 2), (0, 1)), (2, 1), None, NHWC), {}),
    "groups": (NAMES[0], (2, 7, 4), (3, 2, 6), ((1,), "VALID", None, None, ("NHC", "HIO", "NHC"), 2), {}),
    "matrix product": (NAMES[0], (2, 4, 3, 5), (4, 3, 5, 6), ((1, 1), "VALID"), {"dimension_numbers": NHWC}),
    "transposed": (NAMES[1], (2, 5, 4, 3), (3, 2, 3, 4), ((2, 3), "SAME"), {}),
    "transposed kernel": (NAMES[1], (2, 5, 4, 3), (3, 2, 4, 3), ((2, 1), "VALID", None, None, True), {}),
}
# jaxgrad has no kernel for these calls.
XLA_CASES = {
    "batch groups": (NAMES[0], (4, 3, 7, 6), (4, 3, 3, 2), ((1, 1), "SAME"), {"batch_group_count": 2}),
    "four spatial axes": (NAMES[0], (1, 2, 3, 4, 3, 4), (3, 2, 2, 2, 2, 2), ((1, 2, 1, 2), "VALID"), {}),
    "both dilated and strided": (NAMES[0], (2, 3, 7), (4, 3, 3), ((2,), ((1, 1),), (2,)), {}),
}


def _arrays(lhs, rhs, dtype=np.float32):
    rng = np.random.default_rng(sum(lhs))
    return tuple(rng.normal(size=shape).astype(dtype) for shape in (lhs, rhs))


def _value_and_gradients(name, arguments, settings, lhs, rhs):
    """Of the function that has this name in `jax.lax` now."""

    def loss(lhs, rhs):
        y = getattr(jax.lax, name)(lhs, rhs, *arguments, **settings)
        return jnp.sum(jnp.sin(y)), y

    (_, y), gradients = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(lhs, rhs)
    return y, *gradients


def _check(case, monkeypatch, arrays, **settings):
    name, _, _, arguments, given = case
    expected = _value_and_gradients(name, arguments, given, *arrays)
    for each in NAMES:
        monkeypatch.setattr(jax.lax, each, partial(getattr(jaxgrad, each), **settings))
    found = _value_and_gradients(name, arguments, given, *arrays)
    for what, value, desired in zip(("y", "dlhs", "drhs"), found, expected, strict=True):
        assert_close(value, desired, dtype="float32", terms=500, name=what)


@pytest.mark.parametrize("name", oldest_one_in(3, KERNEL_CASES))
def test_assigned_to_the_names_in_lax(name, backend, monkeypatch):
    case = KERNEL_CASES[name]
    _check(case, monkeypatch, backend.put(_arrays(*case[1:3])), implementation=backend.implementation)


@pytest.mark.parametrize("name", oldest_one_in(3, [*KERNEL_CASES, *XLA_CASES]))
def test_assigned_to_the_names_in_lax_without_a_forced_implementation(name, monkeypatch):
    case = {**KERNEL_CASES, **XLA_CASES}[name]
    _check(case, monkeypatch, _arrays(*case[1:3]))


@pytest.mark.parametrize("name", NAMES)
def test_integers_under_the_names_in_lax(name, monkeypatch):
    rng = np.random.default_rng(0)
    lhs, rhs = (rng.integers(-9, 9, shape) for shape in ((2, 5, 4, 3), (3, 2, 3, 4)))
    expected = OF_LAX[name](lhs, rhs, (1, 1), "SAME", dimension_numbers=NHWC)
    for each in NAMES:
        monkeypatch.setattr(jax.lax, each, getattr(jaxgrad, each))
    found = getattr(jax.lax, name)(lhs, rhs, (1, 1), "SAME", dimension_numbers=NHWC)
    np.testing.assert_array_equal(found, expected, strict=True)
