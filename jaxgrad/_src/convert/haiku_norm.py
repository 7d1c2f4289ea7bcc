"""Group, layer, instance and RMS normalization of Haiku."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax

from jaxgrad._src.convert.arrays import as_jax
from jaxgrad._src.convert.haiku_layers import is_channels_last
from jaxgrad._src.convert.norm_weights import Kind, NormWeights, axis_of_record, check_kind, norm_weights
from jaxgrad._src.convert.records import check_record

_READ, _WRITE = "jaxgrad.convert.haiku.read_norm", "jaxgrad.convert.haiku.write_norm"


def read_norm(
    params: Mapping[str, Any],
    *,
    kind: Kind,
    groups: int | None = None,
    axis: int | Sequence[int] | slice = -1,
    eps: float = 1e-5,
    data_format: str = "channels_last",
) -> NormWeights:
    """Reads an `hk.GroupNorm`, `hk.LayerNorm`, `hk.InstanceNorm` or `hk.RMSNorm`.

    Args:
      params: the parameters of the module, such as `params["group_norm"]`.
      kind: "group", "layer", "instance" or "rms". The other arguments are those of the module.
      groups: for "group" the number of groups.
      axis: for "layer" and "rms" the normalized axes, which must be those of the parameters, `param_axis`.
      eps: the number that is added to the variance.
      data_format: for "group" and "instance" the layout, such as "channels_last", "channels_first", "NHWC" or "NCHW".

    Raises:
      TypeError: params is not a mapping, a parameter is not a floating-point array, or a number has the wrong type.
      ValueError: the parameters have other axes, kind or data_format is unknown, groups do not divide the channels, or
        eps is negative or not finite.
    """
    check_kind(_READ, kind)
    channels_last = is_channels_last(_READ, data_format)
    if not isinstance(params, Mapping):
        raise TypeError(f"{_READ}: params must be a mapping, got {type(params).__name__}")
    arrays = [None if params.get(name) is None else as_jax(_READ, name, params[name]) for name in ("scale", "offset")]
    if kind in ("group", "instance"):
        arrays = [None if a is None else a.reshape(-1) for a in arrays]
        return norm_weights(_READ, kind, *arrays, epsilon=eps, num_groups=groups, axis=-1 if channels_last else 1)
    rank = max((a.ndim for a in arrays if a is not None), default=1)
    axes = range(rank)[axis] if isinstance(axis, slice) else (axis,) if isinstance(axis, int) else axis
    axes = tuple(sorted(a - rank if a >= 0 else a for a in axes)) if rank > 1 else tuple(axes)
    if rank > 1 or axes == (-1,):
        for i, array in enumerate(arrays):
            if array is not None:
                arrays[i] = _without_ones(array, axes)
    return norm_weights(_READ, kind, *arrays, epsilon=eps, axis=axes)


def _without_ones(array: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    """An array with the axes of x, without those of size 1 that are not normalized."""
    if any(size != 1 for axis, size in enumerate(array.shape, -array.ndim) if axis not in axes):
        raise ValueError(f"{_READ}: the parameters must have the axes {axes}, got the shape {array.shape}")
    return array.reshape([array.shape[axis] for axis in axes])


def write_norm(weights: NormWeights, *, rank: int = 4) -> dict[str, jax.Array]:
    """Returns the parameters of a module of Haiku, which needs the arguments of the record.

    Args:
      weights: the record.
      rank: the rank of the module's input, which parameters have that are not along its last axis.

    Raises:
      TypeError: weights are not `NormWeights`.
    """
    check_record(_WRITE, weights, NormWeights)
    axes = [axis % rank for axis in axis_of_record(weights)]
    # Haiku has no other axes for parameters along the last one, and no first one for channels of groups.
    first = rank - 1 if axes == [rank - 1] else int(weights.kind == "group")
    written = {}
    for name, array in (("scale", weights.scale), ("offset", weights.bias)):
        if array is not None:
            sizes = dict(zip(axes, array.shape, strict=True))
            written[name] = array.reshape([sizes.get(axis, 1) for axis in range(first, rank)])
    return written
