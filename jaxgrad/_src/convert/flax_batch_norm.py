"""Batch normalization of flax: the variables of `linen.BatchNorm` and `nnx.BatchNorm`."""

from __future__ import annotations

from typing import Any, Literal

from jaxgrad._src.convert.batch_norm_weights import (
    BatchNormWeights,
    as_epsilon,
    as_momentum,
    check_vectors,
)
from jaxgrad._src.convert.flax_layers import layer_of, read_parameter
from jaxgrad._src.convert.records import check_record
from jaxgrad._src.core import checks

_READ, _WRITE = "jaxgrad.convert.flax.read_batch_norm", "jaxgrad.convert.flax.write_batch_norm"


def read_batch_norm(variables: Any, layer: Any = None) -> BatchNormWeights:
    """Reads a `BatchNorm` of linen or nnx.

    Args:
      variables: the variables of the layer as a dictionary with the collections "params" and "batch_stats", such as
        `{"params": v["params"]["norm"], "batch_stats": v["batch_stats"]["norm"]}`; or the state or the layer of nnx.
      layer: the layer of linen or nnx, whose arguments are not among the variables. Not needed if `variables` is a
        layer of nnx.

    Raises:
      TypeError: a variable is not a floating-point array.
      ValueError: variables or layer are not those of a `BatchNorm`, or it has several axes of channels.
    """
    layer = layer_of(_READ, variables, layer, ("momentum", "epsilon", "axis"), "BatchNorm")
    mean, var = (read_parameter(_READ, variables, name) for name in ("mean", "var"))
    scale, bias = (read_parameter(_READ, variables, name, optional=True) for name in ("scale", "bias"))
    assert mean is not None
    assert var is not None
    check_vectors(_READ, scale=scale, bias=bias, mean=mean, var=var)
    if not isinstance(layer.axis, int):
        raise ValueError(f"{_READ}: layer must have one axis of channels, got axis={layer.axis}")
    return BatchNormWeights(
        scale,
        bias,
        mean,
        var,
        epsilon=as_epsilon(_READ, "layer.epsilon", layer.epsilon),
        momentum=as_momentum(_READ, "layer.momentum", layer.momentum),
        feature_axis=layer.axis,
    )


def write_batch_norm(weights: BatchNormWeights, *, api: Literal["linen", "nnx"] = "linen") -> dict[str, Any]:
    """Returns the variables of a `BatchNorm` of flax, which needs `epsilon` and `momentum` of the record.

    Args:
      weights: the record.
      api: "linen" for the collections "params" and "batch_stats", "nnx" for one dictionary, which the layer loads by
        `nnx.update(layer, variables)`.

    Raises:
      TypeError: weights are not `BatchNormWeights`.
    """
    check_record(_WRITE, weights, BatchNormWeights)
    checks.check_choice(_WRITE, "api", api, ("linen", "nnx"))
    params = {name: array for name in ("scale", "bias") if (array := getattr(weights, name)) is not None}
    statistics = {"mean": weights.mean, "var": weights.var}
    if api == "nnx":
        return {**params, **statistics}
    return {"params": params, "batch_stats": statistics}
