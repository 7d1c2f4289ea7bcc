"""The layouts that cuDNN's kernels take."""

from __future__ import annotations

import dataclasses

from jaxgrad._src.conv.geometry import ConvGeometry
from jaxgrad._src.conv.problem import ConvProblem


def kernel_layouts(problem: ConvProblem) -> list[ConvGeometry]:
    """The geometry in the layouts to try, the faster one first: channels last, or first as the caller has them."""
    geometry, n = problem.geometry, len(problem.geometry.w_spatial)
    first, last = tuple(range(n + 2)), (0, n + 1, *range(1, n + 1))
    as_given = geometry.lhs_spec == first and geometry.out_spec == first
    specs = [first, last] if as_given or problem.dtype.name == "float64" else [last, first]
    return [dataclasses.replace(geometry, lhs_spec=spec, rhs_spec=spec, out_spec=spec) for spec in specs]
