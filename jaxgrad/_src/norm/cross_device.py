"""Statistics over several devices, each of which holds a shard of the elements of the same size.

The functions run on each device's shard: inside `shard_map`, or where XLA's partitioner splits a pass. They exchange
statistics and [C] arrays only, by sums over the mesh. All arrays have the axis of calls.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax

from jaxgrad._src.norm import xla
from jaxgrad._src.norm.backend import Gradients, Statistics
from jaxgrad._src.norm.params import NormParams
from jaxgrad._src.run.mesh_axes import MeshAxes

# Up to as many devices, gathering the statistics of all takes about as long as one sum of them.
_MAX_GATHERED = 16


def forward(
    params: NormParams,
    mesh_axes: MeshAxes,
    local_statistics: Callable[..., Any],
    normalize: Callable[..., Any],
    x: jax.Array,
    scale: jax.Array,
    bias: jax.Array,
    residual: jax.Array | None,
) -> tuple[jax.Array | None, ...]:
    """The forward pass with the statistics of the elements of all devices.

    Args:
      params: the static arguments.
      mesh_axes: the devices that share the elements of a group.
      local_statistics: x -> (mean, mean_low, var, rstd) of a shard.
      normalize: (x, scale, bias, mean, mean_low, rstd, residual) -> (y,).
      x, scale, bias, residual: the operands of the pass.
    """
    mean, mean_low, var, _ = local_statistics(x)
    own, pmean = (mean, mean_low, var), mesh_axes.pmean
    if mesh_axes.size <= _MAX_GATHERED:  # one collective instead of two
        own, pmean = mesh_axes.all_gather_by_psum(own), _mean_over_devices
    mean, mean_low, var, rstd = xla.combine_statistics(params, *own, pmean=pmean)
    (y,) = normalize(x, scale, bias, mean, mean_low, rstd, residual)
    return y, mean, mean_low, var, rstd


def _mean_over_devices(arrays: Any) -> Any:
    return jax.tree.map(lambda gathered: gathered.mean(0), arrays)


def backward(
    params: NormParams,
    mesh_axes: MeshAxes,
    local_sums: Callable[..., Any],
    needs_grad: tuple[bool, ...],
    x: jax.Array,
    scale: jax.Array,
    bias: jax.Array | None,
    mean: jax.Array | None,
    mean_low: jax.Array | None,
    rstd: jax.Array,
    y: jax.Array | None,
    residual: jax.Array | None,
    dy: jax.Array | None,
    dmean: jax.Array | None,
    dvar: jax.Array | None,
) -> tuple[jax.Array | None, ...]:
    """The backward pass: sums of each shard, and XLA computes dx from the sums of all devices.

    Inside `shard_map` the pass returns dscale and dbias of the device's own shard: JAX sums them over the mesh where
    scale and bias are replicated.

    Args:
      params: the static arguments.
      mesh_axes: the devices that share the elements of a group.
      local_sums: the operands of the pass -> `xla.channel_sums` of a shard.
      needs_grad: which gradients are needed.
      x, scale, bias, mean, mean_low, rstd, y, residual, dy, dmean, dvar: the operands of the pass.
    """
    own = local_sums(x, scale, bias, mean, mean_low, rstd, y, residual, dy, None, None)
    total = mesh_axes.psum(own)
    if params.mesh_axes is not None:
        dmean, dvar = (mesh_axes.psum_cotangent(cotangent, x) for cotangent in (dmean, dvar))
    on_xla = xla.over_calls(partial(_backward, params, needs_grad, mesh_axes.size))
    found = on_xla(x, scale, bias, mean, mean_low, rstd, y, residual, dy, dmean, dvar, total)
    if params.mesh_axes is not None:
        of_shard = zip((found.scale, found.bias), reversed(own), strict=True)
        dscale, dbias = (None if result is None else sums for result, sums in of_shard)
        found = found._replace(scale=dscale, bias=dbias)
    return tuple(found)


def _backward(
    params: NormParams,
    needs_grad: tuple[bool, ...],
    num_devices: int,
    x: jax.Array,
    scale: jax.Array,
    bias: jax.Array | None,
    mean: jax.Array | None,
    mean_low: jax.Array | None,
    rstd: jax.Array,
    *rest: Any,
) -> Gradients:
    """The backward pass of one call, from the sums of all devices, the last operand."""
    *others, sums = rest
    run = partial(xla.backward, needs_grad=needs_grad, sums=sums, num_devices=num_devices)
    return run(params, x, scale, bias, Statistics(mean, mean_low, rstd), *others)
