"""The CUDA kernels of the GRU on a GPU: sizes around their tiles, precision, long sequences, and many launches."""

from __future__ import annotations

import gru_references
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from backends import CPU_KERNEL, CUDA
from gru_cases import Case, Cotangents, fill_padding, make_inputs
from gru_running import values_and_gradients
from jax import lax
from tolerances import assert_results_close

pytestmark = pytest.mark.gpu

DTYPES = ("float32", "bfloat16", "float16")
HIDDEN = (1, 16, 31, 43, 64, 127, 128, 129, 200, 256)
ROWS = (1, 7, 8, 9, 16, 17, 33, 64, 300)


def _as_float64(array):
    return array if array.dtype.kind in "bi" else array.astype(np.float64)


def _check(case, dtype):
    """Compares with the CPU kernels in float64, which need not be compiled for every size."""
    inputs, cotangents = make_inputs(case, dtype)
    found = values_and_gradients(CUDA, fill_padding(inputs, np.nan), cotangents, case.settings)
    expected = values_and_gradients(CPU_KERNEL, *jax.tree.map(_as_float64, (inputs, cotangents)), case.settings)
    assert_results_close(found, expected, dtype=dtype, terms=case.terms, backend=CUDA)


@pytest.mark.parametrize("linear_before_reset", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("H", HIDDEN)
def test_hidden_units(H, dtype, linear_before_reset):
    direction = ("forward", "reverse", "bidirectional")[H % 3]
    case = Case(T=7, B=ROWS[H % len(ROWS)], I=11, H=H, direction=direction, linear_before_reset=linear_before_reset)
    _check(case, dtype)


@pytest.mark.parametrize("linear_before_reset", [False, True])
@pytest.mark.parametrize("B", ROWS)
def test_rows(B, linear_before_reset):
    _check(Case(T=5, B=B, I=6, H=70, direction="bidirectional", linear_before_reset=linear_before_reset), "float32")


@pytest.mark.parametrize("dtype", DTYPES)
def test_long_sequences(dtype):
    case = Case(T=20_000, B=3, I=4, H=40, linear_before_reset=dtype != "float32")
    _check(case, dtype)


def test_precision():
    """TF32 has a mantissa of 10 bits. Without it, the recurrent product keeps all 24 bits."""
    case = Case(T=20, B=16, I=32, H=128, linear_before_reset=True).bare()
    inputs, cotangents = make_inputs(case, "float32")
    y, _, expected = gru_references.values_and_gradients(inputs, cotangents, **case.settings)

    def errors():
        found, _, gradients = values_and_gradients(CUDA, inputs, cotangents, case.settings)
        pairs = (found, y), *zip(gradients[:3], expected[:3], strict=True)
        return [np.abs(one - other).max() / np.abs(other).max() for one, other in pairs]

    for precision, least, most in (("default", 2e-5, 5e-3), ("tensorfloat32", 2e-5, 5e-3), ("highest", 0, 2e-6)):
        with jax.default_matmul_precision(precision):
            assert all(least < error < most for error in errors()), (precision, errors())


@pytest.mark.parametrize("linear_before_reset", [False, True])
def test_ten_thousand_launches(linear_before_reset):
    """Each launch gives the same bits, whatever the one before left in shared memory."""
    case = Case(T=3, B=9, I=4, H=33, linear_before_reset=linear_before_reset)
    inputs, cotangents = CUDA.put(make_inputs(case, "float32"))

    def step(x, h):
        outputs, pullback = jax.vjp(
            lambda x, r: CUDA.gru(*inputs._replace(x=x, r=r, initial_h=h), **case.settings), x, inputs.r
        )
        return outputs, pullback(tuple(cotangents))

    @jax.jit
    def differing():
        """The number of launches whose results differ from the first. Other inputs run in between."""
        first = step(inputs.x, inputs.initial_h)

        def body(i, count):
            other = step(inputs.x * (i % 7), -inputs.initial_h)
            again = step(inputs.x + 0 * other[0][1][0, 0, 0], inputs.initial_h)
            equal = jax.tree.leaves(jax.tree.map(lambda a, b: jnp.array_equal(a, b), first, again))
            return count + ~jnp.all(jnp.stack(equal))

        return lax.fori_loop(0, 2500, body, 0)

    assert int(differing()) == 0


def test_a_call_that_reads_one_result():
    case = Case(T=6, B=20, I=5, H=100)
    inputs, cotangents = make_inputs(case, "bfloat16")
    for only in (Cotangents(cotangents.y, None), Cotangents(None, cotangents.y_h)):
        found = values_and_gradients(CUDA, inputs, only, case.settings)
        wide = jax.tree.map(_as_float64, (inputs, only))
        expected = values_and_gradients(CPU_KERNEL, *wide, case.settings)
        assert_results_close(found, expected, dtype="bfloat16", terms=case.terms, backend=CUDA)
