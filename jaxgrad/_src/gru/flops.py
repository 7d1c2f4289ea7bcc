"""The floating-point operations of the matrix products of a GRU."""

from __future__ import annotations

from jaxgrad._src.gru.backend import Gradients
from jaxgrad._src.gru.params import GruProblem


def count_flops(problem: GruProblem, needs_grad: tuple[bool, ...] | None = None) -> int:
    """Returns 2 times the number of products, for all steps whatever the lengths of the rows.

    Args:
      problem: the call.
      needs_grad: the gradients that the backward pass computes, one for each field of `Gradients`; None for the forward
        pass.
    """
    p = problem
    if needs_grad is None:
        columns = p.I + p.H
    else:
        needs = dict(zip(Gradients._fields, needs_grad, strict=True))
        # The gradient of each state needs that of the next one.
        columns = p.I * (needs["x"] + needs["w"]) + p.H * (1 + needs["r"])
    return 2 * p.groups * p.D * p.T * p.B * 3 * p.H * columns
