"""The layouts that kernels on a GPU take."""

from __future__ import annotations

import dataclasses

from jaxgrad._src.conv.call.geometry import ConvGeometry
from jaxgrad._src.conv.call.problem import ConvProblem
from jaxgrad._src.native import cuda

_HOPPER = (9, 0)


def kernel_layouts(problem: ConvProblem) -> list[ConvGeometry]:
    """The geometry with the features last and with the features first, in the order in which cuDNN is asked."""
    geometry, n = problem.geometry, len(problem.geometry.w_spatial)
    first, last = tuple(range(n + 2)), (0, n + 1, *range(1, n + 1))
    as_given = geometry.lhs_spec == first and geometry.out_spec == first
    prefers_first = problem.dtype.name == "float64" or (as_given and not xla_moves_features_last(problem))
    specs = [first, last] if prefers_first else [last, first]
    return [dataclasses.replace(geometry, lhs_spec=spec, rhs_spec=spec, out_spec=spec) for spec in specs]


def xla_moves_features_last(problem: ConvProblem) -> bool:
    """Whether XLA computes this convolution with the features last, whatever layout the program has.

    The arrays around it then have the features last in memory too. A kernel that took them first would transpose them
    before and after the call. These are the rules of xla/service/gpu/transforms/layout_assignment.cc. Without a GPU on
    this machine they are those of compute capability 9.0.
    """
    if problem.dtype.name == "float64":
        return False
    capability = cuda.compute_capability()
    if capability is None or capability >= _HOPPER:
        return True
    return problem.dtype.itemsize == 2 and len(problem.geometry.w_spatial) == 2
