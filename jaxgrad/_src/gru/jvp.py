"""Forward mode of the GRU: tangents are derivatives of the XLA implementation."""

from __future__ import annotations

from jaxgrad._src.gru import autodiff, xla
from jaxgrad._src.gru.backend import Gradients
from jaxgrad._src.run.derivative_maps import JvpRules


def _formula(params, *arrays):
    return xla.forward(params, *arrays, save_gates=False)[:2]


def _gradient(params, arrays, cotangents, needed):
    """The hand-written backward pass, whose derivatives are faster than those of the scan's reverse mode."""
    x, w, r, _, *others = arrays
    y, _, gates = xla.forward(params, *arrays, save_gates=True)
    residuals = (x, w, r, *others, y, gates, cotangents.get(0), cotangents.get(1))
    needs_grad = tuple(map(bool, Gradients.fields_of(needed)))
    return xla.backward(params, *residuals, needs_grad=needs_grad).of_operands()


def _differentiated(params, *arrays):
    return autodiff.gru_and_gates(params, *arrays)[:2]


RULES = JvpRules(formula=_formula, gradient=_gradient, differentiated=_differentiated)
