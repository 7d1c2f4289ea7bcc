"""Forward mode of the GRU: tangents are derivatives of the XLA implementation."""

from __future__ import annotations

from jaxgrad._src.core.derivative_maps import JvpRules
from jaxgrad._src.gru import autodiff, xla


def _formula(params, *arrays):
    return xla.forward(params, *arrays, save_gates=False)[:2]


def _gradient(params, arrays, cotangents, needed):
    """The hand-written backward pass, whose derivatives are faster than those of the scan's own reverse mode."""
    x, w, r, _, sequence_lens, initial_h = arrays
    y, _, gates = xla.forward(params, *arrays, save_gates=True)
    needs_grad = tuple(bool(flag) for i, flag in enumerate(needed) if i != 4)  # sequence_lens has no gradient
    residuals = (x, w, r, sequence_lens, initial_h, y, gates, cotangents.get(0), cotangents.get(1))
    found = xla.backward(params, *residuals, needs_grad=needs_grad)
    return found.x, found.w, found.r, found.b, None, found.initial_h


def _differentiated(params, *arrays):
    return autodiff.gru_and_gates(params, *arrays)[:2]


RULES = JvpRules(formula=_formula, gradient=_gradient, differentiated=_differentiated)
