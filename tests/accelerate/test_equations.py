"""Random convolution equations: every reading of each by a pass, on the kernels and on XLA, against float64."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable

import jax
import jax.numpy as jnp
import pytest
from backends import CUDA, CUDNN, ONEDNN, Backend
from equation_cases import EquationCase, in_float64, random_equations
from thorough import thorough_after
from tolerances import assert_close

import jaxgrad
from jaxgrad._src.choice.candidates import XLA
from jaxgrad._src.conv import equation
from jaxgrad._src.conv.call.params import ConvParams
from jaxgrad._src.conv.read.pass_calls import WeightGradientCall
from jaxgrad._src.conv.read.readings import Reading

pytestmark = pytest.mark.jax_version

BACKENDS = (ONEDNN, CUDNN, CUDA)
SEEDS, DEFAULT_SEEDS, COUNT = 120, 5, 12


def _equation(case: EquationCase) -> equation.Equation:
    return equation.Equation.of(case.parameters, (case.lhs, case.rhs, case.result))


def _kind(reading: Reading) -> str:
    call = reading.call
    kind = [call.pass_name]
    if isinstance(call, WeightGradientCall):
        kind += ["lhs_is_dy"] * call.lhs_is_dy + ["independent problems"] * (call.num_problems > 1)
    is_batch_grouped = reading.arguments.batch_group_count > 1 or reading.batch_groups > 1
    kind += ["batch groups"] if is_batch_grouped else ["groups"] * (call.geometry.feature_group_count > 1)
    return ", ".join(kind)


def _on_xla(reading: Reading, case: EquationCase) -> Callable[..., jax.Array]:
    params = ConvParams(reading.call.geometry, None, ((reading.call.pass_name, XLA),), jaxgrad.config.current())

    def compute(lhs, rhs):
        lhs, rhs = (array.astype(case.result.dtype) for array in (lhs, rhs))
        return reading.call.compute(params, reading.regrouped(lhs), rhs)

    return compute


def _plan(reading: Reading, case: EquationCase, backend: Backend) -> equation.EquationPlan:
    platform = "cuda" if backend.platform == "gpu" else "cpu"
    return _equation(case).plan_reading(reading, platform, backend.implementation)


def _computations(case: EquationCase, backend: Backend) -> dict[str, Callable[..., jax.Array]]:
    """All ways to compute an equation, by name. `jaxgrad.accelerate` takes one of them."""
    found = {
        implementation or "fastest": jaxgrad.accelerate(case.on_lax, implementation=implementation)
        for implementation in (backend.implementation, None)
    }
    for reading in _equation(case).readings:
        plan = _plan(reading, case, backend)
        if plan.compute is not None:
            found[f"{_kind(reading)} on {plan.implementation}"] = plan.compute
        found[f"{_kind(reading)} on XLA"] = _on_xla(reading, case)
    return found


@pytest.mark.newest
@pytest.mark.parametrize("seed", thorough_after(DEFAULT_SEEDS, range(SEEDS)))
def test_every_reading_matches_float64(backend, seed):
    for case in random_equations(seed, COUNT):
        computations = _computations(case, backend)
        results = jax.jit(lambda *operands, c=computations: [f(*operands) for f in c.values()])(
            *backend.put((case.lhs, case.rhs))
        )
        expected = in_float64(case)
        for name, result in zip(computations, results, strict=True):
            assert_close(result, expected, dtype=case.result.dtype.name, terms=case.terms, name=f"{name}: {case}")


def test_lax_matches_float64():
    """The reference itself."""
    for case in random_equations(0, COUNT):
        found = jax.jit(case.on_lax)(case.lhs, case.rhs)
        assert_close(found, in_float64(case), dtype=case.result.dtype.name, terms=case.terms, name=str(case))


def test_every_kind_of_reading_has_a_kernel():
    """The cases that run by default include every kind of reading on oneDNN, of each dtype."""
    kinds, dtypes = Counter(), Counter()
    for case in (case for seed in range(DEFAULT_SEEDS) for case in random_equations(seed, COUNT)):
        for reading in _equation(case).readings:
            plan = _plan(reading, case, ONEDNN)
            if plan.implementation != "xla":
                kinds[_kind(reading)] += 1
                dtypes[case.lhs.dtype.name, case.result.dtype.name] += 1
    assert set(kinds) == {
        "forward",
        "forward, groups",
        "forward, batch groups",
        "input_gradient",
        "input_gradient, groups",
        "input_gradient, batch groups",
        "weight_gradient",
        "weight_gradient, lhs_is_dy",
        "weight_gradient, independent problems",
        "weight_gradient, lhs_is_dy, independent problems",
        "weight_gradient, batch groups",
        "weight_gradient, lhs_is_dy, batch groups",
    }
    assert min(kinds.values()) > 1
    assert len(dtypes) == 5


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
def test_a_weight_gradient_of_a_transposed_convolution_on_xla_has_no_input_dilation(platform):
    """JAX writes it with input dilation and a window as large as dy, for which XLA has no fast kernel."""
    x, w, dy = (jnp.zeros(shape) for shape in ((4, 9, 8, 16), (3, 3, 16, 8), (4, 18, 16, 8)))

    def forward(w):
        return jax.lax.conv_general_dilated(
            x, w, (1, 1), ((1, 2), (1, 2)), lhs_dilation=(2, 2), dimension_numbers=("NHWC", "HWIO", "NHWC")
        )

    (written,) = jax.make_jaxpr(lambda x, dy: jax.linear_transpose(forward, w)(dy))(x, dy).eqns
    assert written.params["lhs_dilation"] == (2, 2)
    avals = [var.aval for var in (*written.invars, *written.outvars)]
    plan = equation.plan_equation(written.params, avals, platform, "xla")
    assert (plan.pass_name, plan.implementation) == ("weight_gradient", "xla")
    assert plan.reason.endswith("; jaxgrad writes it for XLA as the weight gradient of a strided convolution")
    text = jax.jit(plan.compute).trace(*avals[:2]).lower(lowering_platforms=(platform,)).as_text()
    (window,) = re.findall(r"lhs_dilate = .*?, rhs_dilate = \[.*?\]", text)
    assert window == "lhs_dilate = [1, 1], rhs_dilate = [2, 2]"
