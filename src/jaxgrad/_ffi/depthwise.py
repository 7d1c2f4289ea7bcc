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

from jaxgrad._conv_geometry import Geometry
from jaxgrad._ffi.conv import _conv_layout, _conv_shapes
from jaxgrad._ffi.conv_cuda import _TYPES, _relaid
from jaxgrad._ffi.registration import cuda, gpu_ordinal


@lru_cache(4096)
def cuda_depthwise_problem(geometry: Geometry, sizes: tuple[int, int, int], dtype: str) -> str:
    """Why the kernel cannot take a weight gradient of batch, features and output features `sizes`, if it cannot."""
    device = gpu_ordinal()
    if device is None:
        return "jaxgrad's own kernel is made for the GPU that a program is lowered on, and there is none here"
    return str(cuda.depthwise_filter_problem(*_described(device, _laid_out(geometry), sizes, dtype)))


@lru_cache(4096)
def _workspace(geometry: Geometry, sizes: tuple[int, int, int], dtype: str) -> int:
    """The bytes of scratch of a call whose operands are laid out as the kernel takes them.

    The kernel is compiled at once, for the first GPU that JAX uses, and is there when the call runs. What a call takes
    follows from that GPU's kind alone, so that every host lowers the same program.
    """
    return int(cuda.depthwise_filter_plan(*_described(gpu_ordinal(), geometry, sizes, dtype)))


def _described(device: int | None, geometry: Geometry, sizes: tuple[int, int, int], dtype: str) -> tuple[Any, ...]:
    """A call as the compiled module is told of it."""
    shapes = map(list, _conv_shapes(geometry, *sizes))
    *layout, groups = _conv_layout(geometry).values()
    return device, _TYPES.index(dtype), *shapes, *(axes.tolist() for axes in layout), int(groups)


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
    if problem := cuda_depthwise_problem(geometry, sizes, x.dtype.name):
        # The dispatch asked for the call itself; this is one that vmap made of it.
        raise NotImplementedError(f"{problem}: {geometry} under vmap; implementation='xla' runs it")
    g = _laid_out(geometry)
    _, w, _ = _conv_shapes(g, *sizes)
    workspace = (_workspace(g, sizes, x.dtype.name),)
    call = jax.ffi.ffi_call(
        "jaxgrad_conv_depthwise_filter", (jax.ShapeDtypeStruct(w, x.dtype), jax.ShapeDtypeStruct(workspace, np.uint8))
    )
    operands = _relaid(x, geometry.lhs_spec, g.lhs_spec), _relaid(dy, geometry.out_spec, g.out_spec)
    dw, _ = call(*operands, **_conv_layout(g))
    return _relaid(dw, g.rhs_spec, geometry.rhs_spec)
