"""The CUDA kernels of the GRU on a GPU: sizes around their tiles, precision, long sequences, and many launches.

test_cuda_variants.py shows which kernel computes a size on a GPU with 132 multiprocessors.
"""

from __future__ import annotations

import functools

import gru_references
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from backends import CPU_KERNEL, CUDA
from gru_cases import Case, Cotangents, Inputs, fill_padding, make_inputs
from gru_groups import values_and_gradients_of_groups
from gru_running import values_and_gradients
from jax import lax
from tolerances import assert_results_close

pytestmark = pytest.mark.gpu

# dtype and precision. The suite's default is "highest".
KINDS = (("float32", "highest"), ("float32", "tensorfloat32"), ("bfloat16", "highest"), ("float16", "highest"))
HIDDEN = (1, 16, 31, 43, 64, 127, 128, 129, 200, 256)
ROWS = (1, 7, 8, 9, 16, 17, 33, 64, 300)


def _as_float64(array):
    return array if array.dtype.kind in "bi" else array.astype(np.float64)


def _compare(found, case, kind, inputs_and_cotangents, requested=None):
    """Compares with the CPU kernels in float64, which need not be compiled for every size."""
    dtype, precision = kind
    wide = jax.tree.map(_as_float64, inputs_and_cotangents)
    expected = values_and_gradients(CPU_KERNEL, *wide, case.settings, requested)
    rounding = precision if precision == "tensorfloat32" else None
    with jax.default_matmul_precision(precision):
        assert_results_close(found, expected, dtype=dtype, terms=case.terms, backend=CUDA, rounding=rounding)


def _check(case, kind, inputs_and_cotangents=None, requested=None):
    dtype, precision = kind
    inputs, cotangents = inputs_and_cotangents or make_inputs(case, dtype)
    with jax.default_matmul_precision(precision):
        found = values_and_gradients(CUDA, fill_padding(inputs, np.nan), cotangents, case.settings, requested)
    _compare(found, case, kind, (inputs, cotangents), requested)


@pytest.mark.parametrize("linear_before_reset", [False, True])
@pytest.mark.parametrize("kind", KINDS, ids="-".join)
@pytest.mark.parametrize("H", HIDDEN)
def test_hidden_units(H, kind, linear_before_reset):
    direction = ("forward", "reverse", "bidirectional")[H % 3]
    case = Case(T=7, B=ROWS[H % len(ROWS)], I=11, H=H, direction=direction, linear_before_reset=linear_before_reset)
    _check(case, kind)


# Hidden units and rows: one tile and several, batches of them, and more parts of the rows than teams.
_TEAMS = ((257, 9), (300, 40), (512, 150), (700, 100), (1024, 70), (1025, 5), (1500, 40), (2048, 70))
_TOO_LARGE = [(H, kind) for kind, most in zip(KINDS, (768, 1024), strict=False) for H, _ in _TEAMS if most < H]


@pytest.mark.parametrize("linear_before_reset", [False, True])
@pytest.mark.parametrize("kind", KINDS, ids="-".join)
@pytest.mark.parametrize(("H", "B"), _TEAMS)
def test_hidden_units_of_teams(H, B, kind, linear_before_reset):
    """More steps than a team has slots to exchange through."""
    if (H, kind) in _TOO_LARGE:
        pytest.skip("the weights do not fit")
    direction = ("reverse", "bidirectional", "forward")[H % 3]
    _check(Case(T=11, B=B, I=5, H=H, direction=direction, linear_before_reset=linear_before_reset), kind)


@pytest.mark.parametrize("linear_before_reset", [False, True])
@pytest.mark.parametrize("kind", KINDS, ids="-".join)
@pytest.mark.parametrize("H", [20, 70, 110])  # blocks of up to four rows and two, clusters, and tensor blocks
@pytest.mark.parametrize("B", [*ROWS, 100, 600])
def test_rows(B, H, kind, linear_before_reset):
    _check(Case(T=5, B=B, I=6, H=H, direction="bidirectional", linear_before_reset=linear_before_reset), kind)


@pytest.mark.parametrize("kind", KINDS, ids="-".join)
@pytest.mark.parametrize(("H", "B"), [(70, 20), (110, 20), (300, 100), (512, 9)])
def test_groups_with_their_own_weights(H, B, kind):
    """Groups, directions and parts of the rows, which teams compute in turn."""
    dtype, precision = kind
    case = Case(T=10, B=B, I=3, H=H, direction="bidirectional", linear_before_reset=H == 512)
    groups = [make_inputs(case.replace(seed=seed), dtype) for seed in range(3)]
    with jax.default_matmul_precision(precision):
        found = values_and_gradients_of_groups(CUDA, groups, case.settings)
    for of_group, inputs_and_cotangents in zip(found, groups, strict=True):
        _compare(of_group, case, kind, inputs_and_cotangents)


@pytest.mark.parametrize("kind", KINDS, ids="-".join)
@pytest.mark.parametrize("H", [40, 110, 200, 300])  # blocks, clusters, teams
def test_long_sequences(H, kind):
    _check(Case(T=20_000, B=3, I=4, H=H, linear_before_reset=kind[0] != "float32"), kind)


@pytest.mark.parametrize("kind", KINDS, ids="-".join)
@pytest.mark.parametrize("H", [40, 110, 300])
@pytest.mark.parametrize("bias", [6.0, 8.0])
def test_gates_that_keep_the_state(bias, H, kind):
    """1 - z is 2^-11.5 for a bias of 8: an error of the gate of that size would make the state grow or forget.

    The 16-bit types round z where it is saved, in all implementations: so there are no gradients.
    """
    case = Case(T=3000, B=3, I=4, H=H, linear_before_reset=True, sequence_lens=False, reset=False, reset_h=False)
    inputs, cotangents = make_inputs(case, kind[0])
    inputs.b[:, :H] += np.asarray(bias, inputs.b.dtype)
    _check(case, kind, (inputs, cotangents), requested=())


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


# A kernel of each sort: blocks, clusters, teams, and blocks that multiply on tensor cores.
_SORTS = [
    (33, 9, "float32"),
    (110, 9, "float32"),
    (200, 9, "float32"),
    (200, 9, "bfloat16"),
    (300, 80, "float32"),
    (300, 80, "bfloat16"),
    (64, 1000, "bfloat16"),
]


@pytest.mark.parametrize("linear_before_reset", [False, True])
@pytest.mark.parametrize(("H", "B", "dtype"), _SORTS)
def test_many_launches(H, B, dtype, linear_before_reset):
    """Each launch gives the same right bits, whatever the one before left in shared memory or in the workspace."""
    launches = 10_000
    case = Case(T=3 if H < 257 else 12, B=B, I=4, H=H, linear_before_reset=linear_before_reset)
    drawn = make_inputs(case, dtype)
    inputs, cotangents = CUDA.put(drawn)

    def step(x, h):
        outputs, pullback = jax.vjp(
            lambda x, r: CUDA.gru(*inputs._replace(x=x, r=r, initial_h=h), **case.settings), x, inputs.r
        )
        return outputs, pullback(tuple(cotangents))

    # XLA may choose a matrix product of dx that adds its parts in any order.
    @functools.partial(jax.jit, compiler_options={"xla_gpu_exclude_nondeterministic_ops": True})
    def differing():
        """The number of launches whose results differ from those before, and the last. Other inputs run in between."""

        def body(i, carry):
            count, before = carry
            other = step(inputs.x * (i % 7), -inputs.initial_h)
            # The same instructions in every iteration: XLA may choose another matrix product elsewhere.
            again = step(inputs.x + 0 * other[0][1][0, 0, 0], inputs.initial_h)
            equal = jnp.all(jnp.stack(jax.tree.leaves(jax.tree.map(jnp.array_equal, before, again))))
            return count + ((i > 0) & ~equal), again

        shapes = jax.eval_shape(step, inputs.x, inputs.initial_h)
        nothing = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), shapes)
        return lax.fori_loop(0, launches // 4, body, (0, nothing))

    count, ((y, y_h), (dx, dr)) = differing()
    assert int(count) == 0
    gradients = Inputs(**{**dict.fromkeys(Inputs._fields), "x": dx, "r": dr})
    _compare((y, y_h, gradients), case, (dtype, "highest"), drawn, ("x", "r"))


def test_a_call_that_reads_one_result():
    case = Case(T=6, B=20, I=5, H=100)
    inputs, cotangents = make_inputs(case, "bfloat16")
    for only in (Cotangents(cotangents.y, None), Cotangents(None, cotangents.y_h)):
        found = values_and_gradients(CUDA, inputs, only, case.settings)
        wide = jax.tree.map(_as_float64, (inputs, only))
        expected = values_and_gradients(CPU_KERNEL, *wide, case.settings)
        assert_results_close(found, expected, dtype="bfloat16", terms=case.terms, backend=CUDA)
