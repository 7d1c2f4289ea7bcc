"""Group, layer, instance and RMS normalization of flax, linen and nnx."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax

from jaxgrad._src.convert.flax_layers import layer_of, read_parameter
from jaxgrad._src.convert.norm_weights import NormWeights, kind_of, norm_weights
from jaxgrad._src.convert.records import check_record

_READ, _WRITE = "jaxgrad.convert.flax.read_norm", "jaxgrad.convert.flax.write_norm"


def read_norm(params: Any, layer: Any = None) -> NormWeights:
    """Reads a `GroupNorm`, `LayerNorm`, `InstanceNorm` or `RMSNorm` of linen or nnx.

    Args:
      params: the parameters of the layer as a dictionary, such as `variables["params"]["norm"]`; or the state or the
        layer of nnx.
      layer: the layer of linen or nnx, whose arguments are not among the parameters. Not needed if `params` is a layer
        of nnx.

    Raises:
      TypeError: a parameter is not a floating-point array, or layer is not one of these.
      ValueError: layer is missing, or has `reduction_axes` or `feature_axes` that the record of its kind does not have:
        for a group normalization given reduced axes, for an instance normalization several axes of features, for the
        others axes of features that are not the reduced ones, or in nnx several.
    """
    layer = layer_of(_READ, params, layer, ("epsilon",), "normalization")
    kind = kind_of(_READ, layer, "flax")
    scale, bias = (read_parameter(_READ, params, name, optional=True) for name in ("scale", "bias"))
    num_groups = None
    if kind == "group":
        axis: Any = -1
        _check(layer, "reduction_axes", None)
        num_groups = layer.num_groups
        if num_groups is None and layer.group_size:
            array = scale if scale is not None else read_parameter(_READ, params, "bias")
            num_groups = array.size // layer.group_size  # type: ignore[union-attr]
    elif kind == "instance":
        axis = layer.feature_axes
        if not isinstance(axis, int):
            raise ValueError(f"{_READ}: layer must have one axis of channels, got feature_axes={axis}")
    else:
        axis = _as_tuple(layer.reduction_axes)
        if sorted(_as_tuple(layer.feature_axes)) != sorted(axis):
            _check(layer, "feature_axes", layer.reduction_axes)
        axis = tuple(sorted(axis))
    epsilon = {"epsilon": layer.epsilon, "epsilon_name": "layer.epsilon"}
    return norm_weights(_READ, kind, scale, bias, **epsilon, num_groups=num_groups, axis=axis)


def _as_tuple(axes: Any) -> tuple[int, ...]:
    return tuple(axes) if isinstance(axes, Iterable) else (axes,)


def _check(layer: Any, name: str, expected: Any) -> None:
    if getattr(layer, name) != expected:
        raise ValueError(f"{_READ}: layer must have {name}={expected}, got {getattr(layer, name)}")


def write_norm(weights: NormWeights) -> dict[str, jax.Array]:
    """Returns the parameters of a layer of linen or nnx, which needs `epsilon` and the groups of the record.

    A layer of nnx loads them by `nnx.update(layer, params)`.

    Raises:
      TypeError: weights are not `NormWeights`.
    """
    check_record(_WRITE, weights, NormWeights)
    return {name: array for name in ("scale", "bias") if (array := getattr(weights, name)) is not None}
