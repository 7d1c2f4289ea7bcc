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
    """One product for all gates gives the gradients of a product for each operand, also with NaN in all padding."""
    calls = []

    def both_forms(params, dgates, recurrent_dgates, gates, previous, x, w, sequence_lens, needs_grad):
        if sequence_lens is not None:
            steps = jax.lax.broadcasted_iota(sequence_lens.dtype, gates.shape, 0)
            gates = jax.numpy.where(steps < sequence_lens[:, None], gates, np.nan)
        arrays = dgates, recurrent_dgates, gates, previous, x, w, sequence_lens
        form = functools.partial(products.products_after_the_scan, params, needs_grad=needs_grad)
        separate, joined = (
            str(jax.make_jaxpr(functools.partial(form, joins_products=joins))(*arrays)).count("dot_general[")
            for joins in (False, True)
        )
        calls.append((separate, joined))
        return form(*arrays, joins_products=True)

    inputs, cotangents = make_inputs(case, XLA.widest)
    jax.clear_caches()
    with mock.patch.object(xla, "products_after_the_scan", both_forms):
        actual = values_and_gradients(XLA, fill_padding(inputs, np.nan), cotangents, case.settings)
    jax.clear_caches()
    directions = 2 if case.direction == "bidirectional" else 1
    assert calls
    for separate, joined in calls:
        assert separate - joined == (0 if case.linear_before_reset else directions)
    expected = gru_references.values_and_gradients(inputs, cotangents, **case.settings)
    assert_results_close(actual, expected, dtype=XLA.widest, terms=case.terms, backend=XLA)
