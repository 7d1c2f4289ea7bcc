"""Gradients that are not requested are not computed, and the others do not change."""

from __future__ import annotations

import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from backends import GRU
from gru_cases import Case, Cotangents, make_inputs
from gru_running import DIFFERENTIABLE, values_and_gradients
from thorough import one_in, thorough_after
from tolerances import assert_results_close

import jaxgrad

BACKENDS = GRU

SUBSETS = [names for n in range(1, 5) for names in itertools.combinations(DIFFERENTIABLE, n)]
SETTINGS = {
    False: Case(T=3, B=4, I=3, H=5, direction="reverse"),
    True: Case(T=3, B=4, I=3, H=5, linear_before_reset=True, clip=0.9),
}


@pytest.mark.parametrize("requested", one_in(2, SUBSETS), ids="-".join)
def test_every_gradient_subset_matches_all_gradients(backend, requested):
    case = SETTINGS[SUBSETS.index(requested) % 2 == 1]
    inputs, cotangents = make_inputs(case, "float32")
    full = values_and_gradients(backend, inputs, cotangents, case.settings)
    some = values_and_gradients(backend, inputs, cotangents, case.settings, requested=requested)
    assert [name for name, g in some[2]._asdict().items() if g is not None] == list(requested)
    assert_results_close(some, full, dtype="float32", terms=case.terms, backend=backend)


def _results_of(target_name: str, hlo: str) -> list[list[str]]:
    """The result shapes of each custom call to a target, such as [["f32[3,4,3]", "f32[0]"]]."""
    lines = [line for line in hlo.splitlines() if f'custom_call_target="{target_name}"' in line]
    return [re.findall(r"\w+\[[\d,]*\]", line.split(" = ", 1)[1].split(" custom-call(")[0]) for line in lines]


def _loss(inputs: dict, implementation: str | None):
    y, y_h = jaxgrad.gru(**inputs, implementation=implementation)
    return jnp.vdot(y, y) + jnp.sum(y_h)


@pytest.mark.parametrize("requested", SUBSETS, ids="-".join)
@pytest.mark.parametrize("jit_inside", thorough_after(1, [False, True]), ids=["jit_of_grad", "grad_of_jit"])
def test_unrequested_gradients_are_empty_in_the_program(requested, jit_inside):
    case = Case(T=3, B=4, I=2, H=5)
    inputs = {name: jnp.asarray(a) for name, a in make_inputs(case, "float32")[0]._asdict().items()}

    def loss(differentiated, others):
        return _loss({**differentiated, **others}, "cpu")

    inner = jax.jit(loss) if jit_inside else loss
    split = {name: inputs[name] for name in requested}, {n: a for n, a in inputs.items() if n not in requested}
    hlo = jax.jit(jax.grad(inner)).lower(*split).compile().as_text()
    (results,) = _results_of("jaxgrad_cpu_gru_backward", hlo)
    shapes = {"x": "f32[1,3,4,2]", "w": "f32[1,1,15,2]", "r": "f32[1,1,15,5]", "b": "f32[1,1,30]"}
    shapes |= dict.fromkeys(("initial_h", "reset_h"), "f32[1,1,4,5]")
    assert results[:6] == [shapes[name] if name in requested else "f32[0]" for name in DIFFERENTIABLE]


def test_no_residuals_without_differentiation():
    arrays = make_inputs(Case(T=3, B=4, I=2, H=5), "float32")[0]
    hlo = jax.jit(lambda a: jaxgrad.gru(**a, implementation="cpu")).lower(arrays._asdict()).compile().as_text()
    (results,) = _results_of("jaxgrad_cpu_gru_forward", hlo)
    assert results[:3] == ["f32[1,3,1,4,5]", "f32[1,1,4,5]", "f32[1,0]"]
    assert "jaxgrad_cpu_gru_backward" not in hlo


@pytest.mark.parametrize(("linear_before_reset", "gates"), [(False, "f32[1,3,1,4,15]"), (True, "f32[1,3,1,4,20]")])
def test_the_residuals_are_the_gates(linear_before_reset, gates):
    inputs = {n: jnp.asarray(a) for n, a in make_inputs(Case(T=3, B=4, I=2, H=5), "float32")[0]._asdict().items()}

    def loss(x):
        arguments = {**inputs, "x": x, "linear_before_reset": linear_before_reset}
        return jnp.sum(jaxgrad.gru(**arguments, implementation="cpu")[0] ** 2)

    hlo = jax.jit(jax.grad(loss)).lower(inputs["x"]).compile().as_text()
    (results,) = _results_of("jaxgrad_cpu_gru_forward", hlo)
    assert results[2] == gates


@pytest.mark.parametrize("read", ["y", "y_h"])
def test_absent_cotangents_are_empty_in_the_program(read):
    inputs = {n: jnp.asarray(a) for n, a in make_inputs(Case(T=3, B=4, I=2, H=5), "float32")[0]._asdict().items()}

    def loss(x):
        return jnp.sum(getattr(Cotangents(*jaxgrad.gru(**{**inputs, "x": x}, implementation="cpu")), read) ** 2)

    text = jax.jit(jax.grad(loss)).lower(inputs["x"]).as_text()
    (call,) = [line for line in text.splitlines() if "custom_call @jaxgrad_cpu_gru_backward" in line]
    operands = re.findall(r"tensor<[^>]*>", call.split(" : (")[1].split(") -> ")[0])
    dy, dy_h = operands[9:11]
    assert (dy == "tensor<0xf32>") == (read == "y_h")
    assert (dy_h == "tensor<0xf32>") == (read == "y")
    np.testing.assert_equal(len(operands), 11)


def test_the_default_implementation_compiles_to_the_kernel_alone():
    arrays = make_inputs(Case(T=3, B=4, I=2, H=5), "float32")[0]
    with jax.default_device(jax.devices("cpu")[0]):
        a = {n: jnp.asarray(v) for n, v in arrays._asdict().items()}
        others = {n: a.pop(n) for n in ("sequence_lens", "reset")}
        hlo = jax.jit(jax.grad(lambda a, others: _loss(a | others, None))).lower(a, others).compile().as_text()
    assert len(_results_of("jaxgrad_cpu_gru_forward", hlo)) == 1
    assert len(_results_of("jaxgrad_cpu_gru_backward", hlo)) == 1
    assert " while(" not in hlo
