"""The products after the scan, in the form that the CUDA kernels choose for few hidden units."""

from __future__ import annotations

import functools
from unittest import mock

import gru_references
import jax
import numpy as np
import pytest
from backends import XLA
from gru_cases import Case, fill_padding, make_inputs
from gru_running import values_and_gradients
from tolerances import assert_results_close

from jaxgrad._src.gru import products, xla

CASES = [
    Case(T=7, B=5, I=3, H=9, direction="forward"),
    Case(T=7, B=4, I=3, H=4, direction="reverse", linear_before_reset=True),
    Case(T=7, B=5, I=3, H=5, direction="bidirectional", clip=0.9),
    Case(T=7, B=2, I=3, H=5, direction="bidirectional").bare(),
    Case(T=0, B=2, I=3, H=5),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_joined_products(case):
    """One product for all gates gives the gradients of a product for each operand."""
    inputs, cotangents = make_inputs(case, XLA.widest)
    joined = mock.Mock(wraps=functools.partial(products.products_after_the_scan, joins_products=True))
    jax.clear_caches()
    with mock.patch.object(xla, "products_after_the_scan", joined):
        actual = values_and_gradients(XLA, fill_padding(inputs, np.nan), cotangents, case.settings)
    jax.clear_caches()
    assert joined.called
    expected = gru_references.values_and_gradients(inputs, cotangents, **case.settings)
    assert_results_close(actual, expected, dtype=XLA.widest, terms=case.terms, backend=XLA)
