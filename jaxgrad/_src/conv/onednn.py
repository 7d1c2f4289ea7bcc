"""The calls of ffi/cpu/conv_ffi.cc, and the plans behind them.

A call whose arrays have an axis before those of its geometry is of as many examples: independent convolutions of one
shape, which share nothing. The handlers take them as rows of one batch too, where the batch is the first axis: as the
calls around it do whose examples share their weights, so that XLA computes what both read once.
"""

from __future__ import annotations

from functools import cache, lru_cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxgrad import _conv_problem
from jaxgrad._conv_geometry import Geometry, dilated_size, oriented
from jaxgrad._conv_problem import Problem
from jaxgrad._ffi.registration import cpu, or_empty

CONV_KINDS = ("forward", "backward_input", "backward_filter")


def _conv_layout(geometry: Geometry) -> dict[str, Any]:
    return {
        "lhs_spec": np.array(geometry.lhs_spec, np.int64),
        "rhs_spec": np.array(geometry.rhs_spec, np.int64),
        "out_spec": np.array(geometry.out_spec, np.int64),
        "window_strides": np.array(geometry.window_strides, np.int64),
        "padding": np.array(geometry.padding, np.int64).reshape(-1),
        "rhs_dilation": np.array(geometry.rhs_dilation, np.int64),
        "feature_group_count": np.int64(geometry.feature_group_count),
    }


def _layout_in_lists(geometry: Geometry) -> dict[str, Any]:
    """As the compiled modules take it where they are called directly."""
    return {
        name: np.ravel(value).tolist() if value.ndim else int(value) for name, value in _conv_layout(geometry).items()
    }


class ConvPlan(NamedTuple):
    """What the compiled module says of one call: the bytes of scratch, and oneDNN's name of the kernel."""

    workspace: int
    implementation: str


@lru_cache(4096)
def conv_plan(kind: str, problem: Problem, has_bias: bool) -> ConvPlan | None:
    """The plan of a call, built while it is lowered and kept for the call itself; None where oneDNN has none.

    The dtype is the one that is computed in: float32 or bfloat16.
    """
    shapes = [(*problem.examples, *shape) for shape in problem.shapes]
    layout = _layout_in_lists(problem.geometry)
    found = cpu.conv_plan(CONV_KINDS.index(kind), problem.dtype == jnp.bfloat16, has_bias, shapes, layout)
    return None if found is None else ConvPlan(*found)


def conv_computed(kind: str, problem: Problem) -> Problem:
    """In the dtype that oneDNN takes: float32 for float16, and for bfloat16 where its kernels will not do."""
    narrow = problem.dtype == jnp.bfloat16 and onednn_has_bfloat16()
    narrow = narrow and not _reads_unwritten_memory(kind, problem.geometry)
    return problem.in_dtype(jnp.dtype("bfloat16" if narrow else "float32"))


def _reads_unwritten_memory(kind: str, geometry: Geometry) -> bool:
    """Whether the bfloat16 kernel reads memory that it never wrote, and gives what it finds there.

    oneDNN 3.2's weight gradient does where the last spatial axis is shorter than its stride and, with three axes, where
    no window lies within the first one: the elements of the window are then never all met at once.
    """
    if kind != "backward_filter":
        return False
    g = geometry
    if g.x_spatial[-1] < g.window_strides[-1]:
        return True
    window, (low, _) = dilated_size(g.w_spatial[0], g.rhs_dilation[0]), g.padding[0]
    starts = (place * g.window_strides[0] - low for place in range(g.y_spatial[0]))
    return len(g.w_spatial) == 3 and not any(0 <= start <= g.x_spatial[0] - window for start in starts)


@cache
def onednn_has_bfloat16() -> bool:
    """Whether oneDNN has real kernels for bfloat16 on this processor."""
    g = Geometry((0, 1, 2), (0, 1, 2), (0, 1, 2), (1,), ((0, 0),), (1,), 1, (32,), (3,))
    plan = conv_plan("forward", Problem(g, 1, 64, 64, jnp.dtype("bfloat16")), False)
    return plan is not None and "ref" not in plan.implementation


def _conv_call(kind: str, problem: Problem, operands: tuple[jax.Array, ...], has_bias: bool) -> tuple[jax.Array, ...]:
    g, examples = problem.geometry, problem.examples
    compute = conv_computed(kind, problem)
    plan = conv_plan(kind, compute, has_bias)
    if plan is None:  # the dispatch asked for the call itself; this is one that vmap made of it
        raise NotImplementedError(
            f"oneDNN has no kernel for the unit {kind} of {g} under vmap; implementation='xla' runs it"
        )
    x, w, y = ((*examples, *shape) for shape in problem.shapes)
    taken, results = {
        "forward": ((g.lhs_spec, None, None), ((y, g.out_spec),)),
        "backward_input": ((g.out_spec, None), ((x, g.lhs_spec),)),
        "backward_filter": (
            (g.lhs_spec, g.out_spec),
            ((w, None), ((*examples, problem.out_features) if has_bias else (0,), None)),
        ),
    }[kind]
    shapes = [jax.ShapeDtypeStruct(_as_rows(*result), compute.dtype) for result in results]
    call = jax.ffi.ffi_call(f"jaxgrad_conv_{kind}", (*shapes, jax.ShapeDtypeStruct((plan.workspace,), np.uint8)))
    arrays = (a.astype(compute.dtype).reshape(_as_rows(a.shape, spec)) for a, spec in zip(operands, taken, strict=True))
    *found, _ = call(*arrays, **_conv_layout(g))
    return tuple(array.astype(problem.dtype).reshape(shape) for array, (shape, _) in zip(found, results, strict=True))


def _as_rows(shape: tuple[int, ...], spec: tuple[int, ...] | None) -> tuple[int, ...]:
    """The shape with its examples, if there are any, as rows of one batch, if `spec` has that as the first axis."""
    if spec is None or len(shape) == len(spec) or spec[0] != 0:
        return shape
    return (shape[0] * shape[1], *shape[2:])


def conv_forward(geometry: Geometry, x: jax.Array, w: jax.Array, bias: jax.Array | None) -> jax.Array:
    """y"""
    operands = (x, oriented(geometry, w), or_empty(bias, x.dtype))
    return _conv_call("forward", _conv_problem.of_forward(geometry, x, w), operands, bias is not None)[0]


def conv_backward_input(geometry: Geometry, dy: jax.Array, w: jax.Array) -> jax.Array:
    """dx"""
    problem = _conv_problem.of_backward_input(geometry, dy, w)
    return _conv_call("backward_input", problem, (dy, oriented(geometry, w)), False)[0]


def conv_backward_filter(
    geometry: Geometry, want_bias: bool, x: jax.Array, dy: jax.Array
) -> tuple[jax.Array, jax.Array | None]:
    """(dw, db)"""
    dw, db = _conv_call("backward_filter", _conv_problem.of_backward_filter(geometry, x, dy), (x, dy), want_bias)
    return oriented(geometry, dw), db if want_bias else None


def conv_plan_cache_info() -> dict[str, int]:
    """Hits, misses, size and capacity of the cache of oneDNN's plans."""
    return dict(cpu.conv_plan_cache_info()) if cpu is not None else {}
