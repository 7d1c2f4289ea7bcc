"""The call of ffi/cuda/depthwise_filter_ffi.cc, and the plans behind it.

The kernel takes channels-last operands, and weights whose output features stand first or last; others are transposed
before the call and after it, in XLA.
"""

from __future__ import annotations

import dataclasses
from functools import lru_cache
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxgrad._conv_geometry import Geometry
from jaxgrad._ffi.conv import _conv_layout, _conv_shapes
from jaxgrad._ffi.conv_cuda import _TYPES, _relaid
from jaxgrad._ffi.registration import cuda, gpu_ordinal


class DepthwiseCall(NamedTuple):
    """How a call runs: the layout that its operands are brought to, the bytes of its workspace, the kernel's tiles."""

    geometry: Geometry
    workspace: int
    tiling: str


@lru_cache(4096)
def cuda_depthwise_plan(geometry: Geometry, sizes: tuple[int, int, int], dtype: str) -> DepthwiseCall | str:
    """The plan of a weight gradient of batch, features and output features `sizes`, or why the kernel cannot take it.

    The kernel is compiled at once, for the first GPU that JAX uses, and is there when the call runs. What a call takes
    follows from that GPU's kind alone, so that every host lowers the same program.

    Raises RuntimeError where it cannot be compiled.
    """
    device = gpu_ordinal()
    if device is None:
        return "the kernel is made for the GPU that a program is lowered on, and there is none here"
    laid_out = _laid_out(geometry)
    layout: dict[str, Any] = {
        name: np.asarray(value).reshape(-1).tolist() for name, value in _conv_layout(laid_out).items()
    }
    layout["feature_group_count"] = laid_out.feature_group_count
    shapes = map(list, _conv_shapes(laid_out, *sizes))
    found = cuda.depthwise_filter_plan(device, _TYPES.index(dtype), *shapes, **layout)
    return found if isinstance(found, str) else DepthwiseCall(laid_out, *found)


def _laid_out(g: Geometry) -> Geometry:
    n = len(g.w_spatial)
    last = (0, n + 1, *range(1, n + 1))
    out, _, *window = g.rhs_spec
    as_given = window == sorted(window) and (out < window[0] or out > window[-1])
    return dataclasses.replace(
        g, lhs_spec=last, rhs_spec=g.rhs_spec if as_given else tuple(range(n + 2)), out_spec=last
    )


def cuda_depthwise_filter(geometry: Geometry, x: jax.Array, dy: jax.Array) -> jax.Array:
    """dw"""
    sizes = (x.shape[geometry.lhs_spec[0]], x.shape[geometry.lhs_spec[1]], dy.shape[geometry.out_spec[1]])
    plan = cuda_depthwise_plan(geometry, sizes, x.dtype.name)
    if isinstance(plan, str):  # the dispatch asked for the call itself; this is one that vmap made of it
        raise NotImplementedError(f"{plan}: {geometry} under vmap; implementation='xla' runs it")
    g = plan.geometry
    _, w, _ = _conv_shapes(g, *sizes)
    call = jax.ffi.ffi_call(
        "jaxgrad_conv_depthwise_filter",
        (jax.ShapeDtypeStruct(w, x.dtype), jax.ShapeDtypeStruct((plan.workspace,), np.uint8)),
    )
    operands: tuple[Any, ...] = (
        _relaid(x, geometry.lhs_spec, g.lhs_spec),
        _relaid(dy, geometry.out_spec, g.out_spec),
    )
    dw, _ = call(*operands, **_conv_layout(g))
    return _relaid(dw, g.rhs_spec, geometry.rhs_spec)
