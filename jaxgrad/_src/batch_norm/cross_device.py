"""Batch statistics over several devices, each of which holds a shard of the batch of the same size.

The functions run on each device's shard: inside `shard_map`, or where XLA's partitioner splits a pass. They exchange
[C] arrays only, by sums over the mesh.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from jaxgrad._src.batch_norm import xla
from jaxgrad._src.batch_norm.backend import Statistics
from jaxgrad._src.batch_norm.params import BatchNormParams
from jaxgrad._src.run.mesh_axes import MeshAxes

# Up to as many devices, gathering the statistics of all takes about as long as one sum of them.
_MAX_GATHERED = 16


def forward(
    params: BatchNormParams,
    mesh_axes: MeshAxes,
    local_statistics: Callable[..., Any],
    normalize: Callable[..., Any],
    x: jax.Array,
    scale: jax.Array,
    bias: jax.Array,
    residual: jax.Array | None,
) -> tuple[jax.Array, ...]:
    """The forward pass with the statistics of the whole batch.

    Args:
      params: the static arguments.
      mesh_axes: the devices that share the batch.
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
    params: BatchNormParams,
    mesh_axes: MeshAxes,
    local_sums: Callable[..., Any],
    needs_grad: tuple[bool, ...],
    x: jax.Array,
    scale: jax.Array,
    bias: jax.Array | None,
    mean: jax.Array,
    mean_low: jax.Array | None,
    rstd: jax.Array,
    y: jax.Array | None,
    dy: jax.Array | None,
    dmean: jax.Array | None,
    dvar: jax.Array | None,
) -> tuple[jax.Array | None, ...]:
    """The backward pass: a kernel computes the sums of each shard, and XLA computes dx from the sums of all devices.

    The sums are dscale and dbias. Inside `shard_map` the pass returns the sums of the device's own shard: JAX sums them
    over the mesh where scale and bias are replicated.

    Args:
      params: the static arguments.
      mesh_axes: the devices that share the batch.
      local_sums: the operands of the pass -> (dx, dscale, dbias, dresidual) of a shard, of which only dscale and dbias
        are not None.
      needs_grad: which gradients are needed.
      x, scale, bias, mean, mean_low, rstd, y, dy, dmean, dvar: the operands of the pass.
    """
    _, dscale, dbias, _ = local_sums(x, scale, bias, mean, mean_low, rstd, y, dy, None, None)
    total_bias, total_scale = mesh_axes.psum((dbias, dscale))
    if params.mesh_axes is None:
        dscale, dbias = total_scale, total_bias
    else:
        dmean, dvar = (mesh_axes.psum_cotangent(cotangent, x) for cotangent in (dmean, dvar))
    found = xla.backward(
        params,
        x,
        scale,
        bias,
        Statistics(mean, mean_low, rstd),
        y,
        dy,
        dmean,
        dvar,
        needs_grad=needs_grad,
        sums=(total_bias, total_scale),
        num_devices=mesh_axes.size,
    )
    gradients = (found.x, dscale, dbias, found.residual)
    return tuple(gradient if needed else None for gradient, needed in zip(gradients, needs_grad, strict=True))
