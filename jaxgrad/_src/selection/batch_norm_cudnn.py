"""When batch normalisation runs on cuDNN, and how: what it can take, and where XLA is known to be as fast.

This is the one place that says so; `jaxgrad.explain` tells what it says.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jaxgrad import _batch_norm_xla, _ffi
from jaxgrad._batch_norm_xla import Gradients, Statistics
from jaxgrad._dispatch import Kernel, Obstacle, Obstacles

KERNEL = Kernel("cudnn", "cuDNN makes the fewest launches", _ffi.cuda_problem, "cuDNN kernels")
UNITS = ("forward", "backward")

_LEVEL = "XLA is as fast for an array of this size, and fuses what stands around it"
_ROWS, _LEAST_CHANNELS = range(1024, 4097), 32  # of which cuDNN was ahead


def faster_on_xla(x: jax.Array, feature_axis: int) -> str:
    """Why XLA is to be preferred; empty where cuDNN is the faster, and as accurate.

    A row is one element of each channel. Measured on an H200, jax 0.11.2, cuDNN 9.19, in bfloat16 and float32, forward
    and backward together. From some ten thousand rows on XLA's two passes forward and two backward take about as long
    as it takes to read and write the arrays, and up to a third less than cuDNN's. Of fewer rows launches count: cuDNN
    makes one forward and one backward, XLA several. cuDNN took 14 us where XLA took 19 for 1568 rows of 256 channels,
    and more than XLA for 2048 rows of 16, for 6272 rows and for some hundreds. In float32 that would be bought with
    digits of the mean; 16-bit values have fewer than one part.
    """
    if not _ffi.cuda_batch_norm_fuses(x, feature_axis):
        return "cuDNN's fast kernels are for channels that come last, in 32 bits or fewer"
    if x.dtype.itemsize > 2:
        return "XLA keeps twice the digits of the mean in this dtype, and is about as fast"
    channels = x.shape[feature_axis]
    return "" if x.size // channels in _ROWS and channels >= _LEAST_CHANNELS else _LEVEL


# What the usual case meets.
USUAL: Obstacles = {("cudnn", unit): Obstacle(_LEVEL, slower=True) for unit in UNITS}


def takes(x: jax.Array) -> bool:
    """Whether cuDNN can run a call at all: it counts elements in 32 bits."""
    return x.size < 2**31


def obstacle(
    x: jax.Array, feature_axis: int, relu: bool, residual: bool, implementation: str | None
) -> Obstacle | None:
    """What stands in the way of cuDNN in a call."""
    if implementation not in (None, "cudnn") or x.size == 0 or _ffi.cuda_problem():
        return None  # it is not asked for, there is nothing to run, or the dispatch tells by itself
    if not takes(x):
        return Obstacle(f"cuDNN takes fewer than 2^31 elements, x has {x.size}")
    if implementation is None and (reason := faster_on_xla(x, feature_axis)):
        return Obstacle(reason, slower=True)
    if problem := _ffi.cuda_batch_norm_problem(x, feature_axis, relu, residual):
        return Obstacle(f"cuDNN refuses the call: {problem}")
    return None


def forward(
    x: jax.Array,
    scale: jax.Array,
    bias: jax.Array,
    residual: jax.Array | None,
    *,
    feature_axis: int,
    epsilon: float,
    relu: bool,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array]:
    """`(y, mean, mean_low, var, rstd)`; cuDNN's mean has one part, and mean_low is zero."""
    fused = relu and _ffi.cuda_batch_norm_fuses(x, feature_axis, residual is not None)
    settings: dict[str, Any] = {"feature_axis": feature_axis, "epsilon": epsilon, "relu": fused}
    y, mean, rstd, unbiased = _ffi.cuda_batch_norm_forward(x, scale, bias, residual if fused else None, **settings)
    if not fused:
        if residual is not None:
            y = (y.astype(mean.dtype) + residual.astype(mean.dtype)).astype(y.dtype)
        y = jax.nn.relu(y) if relu else y
    n = x.size // x.shape[feature_axis]
    var = unbiased * ((n - 1) / n) if n > 1 else jnp.where(jnp.isfinite(mean), 0, jnp.nan)
    return y, mean, jnp.zeros_like(mean), var.astype(mean.dtype), rstd


def backward(
    x: jax.Array,
    scale: jax.Array,
    bias: jax.Array | None,
    statistics: Statistics,
    y: jax.Array | None,
    dy: jax.Array,
    dmean: jax.Array | None,
    dvar: jax.Array | None,
    *,
    feature_axis: int,
    epsilon: float,
    relu: bool,
    wanted: tuple[bool, ...],
) -> Gradients:
    """As `_batch_norm_xla.backward`, for statistics that are not frozen."""
    fused = relu and y is None and _ffi.cuda_batch_norm_fuses(x, feature_axis)
    g = dy
    if relu and not fused:
        g = jnp.where(_batch_norm_xla.passed(x, scale, bias, statistics, y, feature_axis=feature_axis), dy, 0)
    settings: dict[str, Any] = {"feature_axis": feature_axis, "epsilon": epsilon, "relu": fused}
    dx, dscale, dbias = _ffi.cuda_batch_norm_backward(
        x, g, scale, bias if fused else None, statistics.mean, statistics.rstd, **settings
    )
    if dmean is not None or dvar is not None:
        through = _batch_norm_xla.through_statistics(x, statistics, dmean, dvar, feature_axis=feature_axis)
        dx = (dx.astype(through.dtype) + through).astype(x.dtype)
    found = Gradients(dx, dscale, dbias, g)
    return Gradients(*(gradient if want else None for gradient, want in zip(found, wanted, strict=True)))
