"""The calls of the convolutions that `jaxgrad.tune` measures."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax

from jaxgrad._src.choice.candidates import XLA, Candidates
from jaxgrad._src.choice.measured_choices import Measurable
from jaxgrad._src.choice.selection import supporting
from jaxgrad._src.conv.backends import BACKENDS
from jaxgrad._src.conv.call.params import ConvCall, ConvParams
from jaxgrad._src.conv.equation import Equation
from jaxgrad._src.conv.passes import forward_pass, input_gradient_pass, weight_gradient_pass


def measurable_pass(pass_name: str, call: ConvCall, platform: str) -> Measurable:
    """The pass of an op, on every implementation that supports it."""
    candidates = {"xla": XLA}
    for backend in BACKENDS:
        if backend.platform == platform:
            own = supporting(Candidates((backend.implementation,), even_if_slower=True), (backend,), pass_name, call)
            candidates |= dict.fromkeys(own.implementations, own)
    return Measurable(
        {name: _pass(pass_name, call, own) for name, own in candidates.items()}, operands(pass_name, call)
    )


def _pass(pass_name: str, call: ConvCall, candidates: Candidates) -> Callable[..., Any]:
    params = params_of(pass_name, call, candidates)
    if pass_name == "forward":
        run = forward_pass(params, call.relu)
        return run if call.has_bias else lambda x, w: run(x, w, None)
    if pass_name == "input_gradient":
        return input_gradient_pass(params)
    return weight_gradient_pass(params, call.has_bias)


def params_of(pass_name: str, call: ConvCall, candidates: Candidates) -> ConvParams:
    """The parameters of a pass."""
    problem = call.problem
    of_passes = ((pass_name, candidates),)
    return ConvParams(problem.geometry, call.precision, of_passes, call.settings, batched=bool(problem.num_problems))


def operands(pass_name: str, call: ConvCall) -> list[jax.ShapeDtypeStruct]:
    """The operands of a pass."""
    p = call.problem
    array = partial(jax.ShapeDtypeStruct, dtype=p.dtype)
    x, w, y = (array((*p.num_problems, *shape)) for shape in p.shapes)
    bias = [array((*p.num_problems, p.out_features))] if call.has_bias else []
    return {"forward": [x, w, *bias], "input_gradient": [y, w], "weight_gradient": [x, y]}[pass_name]


def measurable_equation(equation: Equation, platform: str) -> Measurable:
    """An accelerated convolution, in every way to compute it."""
    return Measurable(equation.alternatives(platform), [equation.lhs, equation.rhs])
