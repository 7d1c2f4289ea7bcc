"""The call of ffi/cuda/depthwise_filter_ffi.cc, and the plans behind it.

The kernel takes channels-last operands, and weights whose output features stand first or last; others are transposed
before the call and after it, in XLA.
"""

from __future__ import annotations

import dataclasses
from functools import lru_cache
from typing import Any

import jax
import numpy as np

from jaxgrad import _conv_problem
from jaxgrad._conv_geometry import Geometry, oriented
from jaxgrad._conv_problem import Problem
from jaxgrad._ffi.conv import _conv_layout, _layout_in_lists
from jaxgrad._ffi.conv_cuda import _TYPES, _relaid
from jaxgrad._ffi.registration import cuda, gpu_ordinal


@lru_cache(4096)
def cuda_depthwise_problem(problem: Problem) -> str:
    """Why the kernel cannot take a weight gradient; empty where it can."""
    device = gpu_ordinal()
    if device is None:
        return "jaxgrad's own kernel is made for the GPU that a program is lowered on, and there is none here"
    return str(cuda.depthwise_filter_problem(*_described(device, _laid_out(problem))))


@lru_cache(4096)
def _workspace(problem: Problem) -> int:
    """The bytes of scratch of a call whose operands are laid out as the kernel takes them.

    The kernel is compiled at once, for the first GPU that JAX uses, and is there when the call runs. What a call takes
    follows from that GPU's kind alone, so that every host lowers the same program.
    """
    return int(cuda.depthwise_filter_plan(*_described(gpu_ordinal(), problem)))


def _described(device: int | None, problem: Problem) -> tuple[Any, ...]:
    """A call as the compiled module is told of it."""
    return device, _TYPES.index(problem.dtype.name), problem.shapes, _layout_in_lists(problem.geometry)


def _laid_out(problem: Problem) -> Problem:
    g = problem.geometry
    n = len(g.w_spatial)
    last = (0, n + 1, *range(1, n + 1))
    out, _, *window = g.rhs_spec
    as_given = window == sorted(window) and (out < window[0] or out > window[-1])
    weights = g.rhs_spec if as_given else tuple(range(n + 2))
    return problem.laid_out(dataclasses.replace(g, lhs_spec=last, rhs_spec=weights, out_spec=last))


def cuda_depthwise_filter(geometry: Geometry, x: jax.Array, dy: jax.Array) -> jax.Array:
    """dw"""
    problem = _conv_problem.of_backward_filter(geometry, x, dy)
    if reason := cuda_depthwise_problem(problem):
        # The dispatch asked for the call itself; this is one that vmap made of it.
        raise NotImplementedError(f"{reason}: {geometry} under vmap; implementation='xla' runs it")
    taken = _laid_out(problem)
    g = taken.geometry
    call = jax.ffi.ffi_call(
        "jaxgrad_conv_depthwise_filter",
        (jax.ShapeDtypeStruct(taken.w_shape, x.dtype), jax.ShapeDtypeStruct((_workspace(taken),), np.uint8)),
    )
    operands = _relaid(x, geometry.lhs_spec, g.lhs_spec), _relaid(dy, geometry.out_spec, g.out_spec)
    dw, _ = call(*operands, **_conv_layout(g))
    return oriented(geometry, _relaid(dw, g.rhs_spec, geometry.rhs_spec))
