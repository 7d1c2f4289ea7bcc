"""The forms in which XLA runs a pass: they compute the same, and the table of preferences chooses."""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from backends import float64_on_cpu
from conv_cases import ConvCase, cotangent, make_conv_inputs
from conv_references import lax_conv
from thorough import one_in

import jaxgrad
from jaxgrad._src.choice import table
from jaxgrad._src.choice.settings import of_kernels
from jaxgrad._src.conv.call.params import ConvParams
from jaxgrad._src.conv.call.problem import ConvProblem
from jaxgrad._src.conv.on_xla import forms as xla_forms
from jaxgrad._src.conv.on_xla import xla
from jaxgrad._src.conv.read.convolution import LaxArguments
from jaxgrad._src.conv.read.op_call import read

CASES = {
    "covers": ConvCase(spatial=(3, 2), bias=False),
    "disjoint": ConvCase(strides=(3, 4), padding=((1, 0), (0, 2)), bias=False),
    "disjoint groups": ConvCase(strides=(4, 2), groups=3, layout=("NHWC", "HWIO", "NHWC"), bias=False),
    "groups": ConvCase(strides=(2, 1), groups=2, padding=((2, 0), (0, 1)), rhs_dilation=(1, 2), bias=False),
    "depthwise": ConvCase(features=1, out_features=1, groups=5, padding="SAME", bias=False),
    "one channel": ConvCase(features=1, out_features=1, strides=(3, 4), padding=((1, 0), (0, 2)), bias=False),
    "depthwise, many taps": ConvCase(
        features=1,
        out_features=1,
        groups=3,
        window=(9, 8),
        strides=(2, 1),
        padding=((8, 7), (9, 13)),
        rhs_dilation=(1, 2),
        layout=("NHWC", "OIHW", "NCHW"),
        bias=False,
    ),
    "plain": ConvCase(padding="SAME", bias=False),
    "plain groups": ConvCase(groups=2, padding="SAME", bias=False),
}
# By case, the forms that compute the forward pass and the input gradient, and the weight gradient, also of independent
# problems.
FORMS = {
    "covers": (["product"], ["product"], ["product"]),
    "disjoint": (["patches"], ["patches"], ["patches", "taps"]),
    "disjoint groups": (["patches"], ["patches", "taps"], ["patches", "taps"]),
    "groups": ([], ["taps"], ["taps"]),
    "depthwise": ([], ["taps"], ["taps"]),
    "one channel": (["patches"], ["patches"], ["patches", "taps"]),
    "depthwise, many taps": ([], ["taps"], ["taps"]),
    "plain": ([], [], ["taps"]),
    "plain groups": ([], ["taps"], ["taps"]),
}


def _problem(case, problems=()):
    x, w, _ = make_conv_inputs(case)
    geometry = read(LaxArguments(**case.settings), x, w, False).pass_call.geometry
    features = case.features * case.groups
    return ConvProblem(geometry, case.batch, features, case.out_features * case.groups, jnp.dtype(x.dtype), problems)


@pytest.mark.parametrize("problems", [(), (3,)], ids=["", "problems"])
@pytest.mark.parametrize("name", one_in(2, CASES))
def test_every_form_computes_the_same(name, problems):
    case = CASES[name]
    problem = _problem(case, problems)
    drawn = [make_conv_inputs(case.replace(seed=seed), "float64") for seed in range(*(problems or (1,)))]
    op = lax_conv(case)
    dys = [cotangent(jax.eval_shape(op, *each).shape, "float64", seed=seed) for seed, each in enumerate(drawn)]
    of_others, of_weights, of_problems = FORMS[name]
    with float64_on_cpu():
        x, w, dy = (np.stack(arrays) for arrays in ([a.lhs for a in drawn], [a.rhs for a in drawn], dys))
        y, pullback = jax.vjp(jax.vmap(lambda x, w: op(x, w, None)), x, w)
        dx, dw = pullback(dy)
        params = ConvParams(problem.geometry, "highest", (), of_kernels(), batched=bool(problems))
        passes = {
            "forward": (lambda x, w, form: xla.forward(params, False, x, w, None, form=form), (x, w), y),
            "input_gradient": (partial(xla.input_gradient, params), (dy, w), dx),
            "weight_gradient": (lambda *a, form: xla.weight_gradient(params, False, *a, form=form)[0], (x, dy), dw),
        }
        for pass_name, (run, operands, expected) in passes.items():
            forms = xla_forms.forms(pass_name, problem)
            own = of_others if pass_name != "weight_gradient" else of_problems if problems else of_weights
            assert list(forms) == [*own, "convolution"], pass_name
            if not problems:
                operands, expected = [operand[0] for operand in operands], expected[0]
            for form in forms:
                found = jax.jit(partial(run, form=form))(*operands)
                np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12, err_msg=f"{pass_name} {form}")


def _lowered(case, platform):
    x, w, _ = make_conv_inputs(case)

    def weight_gradient(x, w):
        return jax.grad(lambda w: jnp.sum(op(x, w)))(w)

    op = partial(jaxgrad.conv_general_dilated, **case.settings, implementation="xla")
    return jax.jit(weight_gradient).trace(x, w).lower(lowering_platforms=(platform,)).as_text()


@pytest.mark.parametrize(
    ("name", "platform", "preferred"),
    [
        ("covers", "cpu", "product"),
        ("disjoint", "cpu", "patches"),
        ("groups", "cpu", "taps"),
        ("depthwise", "cpu", "taps"),
        ("groups", "cuda", "taps"),
        ("plain groups", "cuda", "convolution"),
    ],
)
def test_the_table_chooses(name, platform, preferred, monkeypatch, request):
    """With another choice in the table of the platform, the program has another form."""
    case = CASES[name]
    assert xla_forms.preferred_form("weight_gradient", _problem(case), platform) == preferred
    assert ("stablehlo.convolution" in _lowered(case, platform)) == (preferred == "convolution")
    other = "taps" if preferred == "convolution" else "convolution"
    rows = table.rows

    def changed(of_platform):
        found = rows(of_platform)
        return tuple(dataclasses.replace(row, prefer=other) if row.op == xla_forms.OP else row for row in found)

    monkeypatch.setattr(table, "rows", changed)
    jax.clear_caches()  # functions that were traced before
    request.addfinalizer(jax.clear_caches)
    assert ("stablehlo.convolution" in _lowered(case, platform)) == (other == "convolution")


@pytest.mark.parametrize("platform", ["tpu", "rocm"])
def test_other_platforms_take_the_table_of_cpus(platform):
    assert xla_forms.preferred_form("forward", _problem(CASES["disjoint"]), platform) == "patches"
