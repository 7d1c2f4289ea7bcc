"""When a unit of the triangle runs on oneDNN: what oneDNN can take, and where XLA is known to be faster.

This is the one place that says so; `jaxgrad.explain` tells what it says.
"""

from __future__ import annotations

import jax

from jaxgrad import _conv_xla, _ffi
from jaxgrad._conv_geometry import Geometry
from jaxgrad._conv_problem import Problem
from jaxgrad._dispatch import Obstacle, Obstacles, cpu_kernel

KERNEL = cpu_kernel("oneDNN", _ffi.onednn_problem)

_DTYPES = ("float32", "bfloat16", "float16")
_FEW_MULTIPLICATIONS = 2000  # below, a call costs its dispatch and no more: 7 us on XLA, 8 us on oneDNN


def faster_on_xla(kind: str, problem: Problem) -> str:
    """Why XLA is to be preferred for a unit, if it is. Measured on an AMD EPYC with AVX-512, in float32."""
    g = problem.geometry
    if g.feature_group_count > 1:
        return ""
    if g.is_product:
        return _conv_xla.PRODUCT
    if problem.multiplications < _FEW_MULTIPLICATIONS:
        return f"XLA is faster for as few as {problem.multiplications} multiplications"
    features_first = g.lhs_spec[1] != len(g.lhs_spec) - 1
    if kind == "backward_filter" and features_first and len(g.w_spatial) == 1 and g.rhs_dilation[0] > 1:
        return "XLA's weight gradient of a dilated window over one axis is faster where the features stand first"
    return ""


def obstacles(problem: Problem, has_bias: bool) -> Obstacles:
    """What stands in the way of oneDNN in each unit of a call."""
    return {("cpu", kind): _obstacle(kind, problem, has_bias) for kind in _ffi.CONV_KINDS}


def _obstacle(kind: str, problem: Problem, has_bias: bool) -> Obstacle | None:
    if problem.dtype.name not in _DTYPES:
        return Obstacle(f"oneDNN has no {problem.dtype.name}")
    if _ffi.onednn_problem():
        return None  # which the dispatch tells by itself
    if not has_plan(kind, problem, has_bias):
        return Obstacle(f"oneDNN has no fast kernel for the unit {kind} of this shape")
    if reason := faster_on_xla(kind, problem):
        return Obstacle(reason, slower=True)
    return None


def has_plan(kind: str, problem: Problem, has_bias: bool) -> bool:
    """Whether oneDNN has a kernel, and not only the reference implementation of one."""
    plan = _ffi.conv_plan(kind, _ffi.conv_computed(kind, problem), has_bias and kind != "backward_input")
    return plan is not None and not plan.implementation.startswith("ref")


def forward(geometry: Geometry, relu: bool, x: jax.Array, w: jax.Array, bias: jax.Array | None) -> jax.Array:
    """y, or its relu, which XLA takes: oneDNN's own makes zero of NaN."""
    return _conv_xla.finish(_ffi.conv_forward(geometry, x, w, bias), None, relu, geometry.out_spec)
