"""Group, layer and RMS normalization of equinox."""

from __future__ import annotations

import operator
from typing import Any

import equinox as eqx
import jax.numpy as jnp

from jaxgrad._src.convert.arrays import as_jax
from jaxgrad._src.convert.norm_weights import NormWeights, kind_of, norm_weights
from jaxgrad._src.convert.records import check_record

_READ, _WRITE = "jaxgrad.convert.equinox.read_norm", "jaxgrad.convert.equinox.write_norm"


def read_norm(layer: Any) -> NormWeights:
    """Reads an `eqx.nn.GroupNorm`, `LayerNorm` or `RMSNorm`. The record takes batches.

    Raises:
      TypeError: layer is not one of these.
    """
    kind = kind_of(_READ, layer, "equinox")
    arrays = (None if a is None else as_jax(_READ, n, a) for n, a in (("weight", layer.weight), ("bias", layer.bias)))
    epsilon: dict[str, Any] = {"epsilon": layer.eps, "epsilon_name": "layer.eps"}
    if kind == "group":
        return norm_weights(_READ, kind, *arrays, **epsilon, num_groups=layer.groups, axis=1)
    return norm_weights(_READ, kind, *arrays, **epsilon, axis=range(-len(layer.shape), 0))


def write_norm(weights: NormWeights, layer: Any) -> Any:
    """Returns a layer of equinox with the arrays of the record.

    Args:
      weights: the record. An instance normalization is a group normalization with a group for each channel.
      layer: a layer with the same arguments.

    Raises:
      TypeError: weights are not `NormWeights`, or layer is not a normalization of equinox.
      ValueError: layer is of another kind, has another `eps`, other `groups` or another shape, or lacks an array that
        the record has.
    """
    check_record(_WRITE, weights, NormWeights)
    kind, is_instance = kind_of(_WRITE, layer, "equinox"), weights.kind == "instance"
    own: dict[str, Any] = {"kind": "group" if is_instance else weights.kind, "eps": weights.epsilon}
    found = {"kind": kind, "eps": layer.eps}
    if kind == "group":
        own["groups"] = layer.channels if is_instance else weights.num_groups
        found["groups"] = layer.groups
    for name, value in own.items():
        if found[name] != value:
            raise ValueError(f"{_WRITE}: layer must have {name}={value} of the weights, got {found[name]}")
    for name, array, missing in (("weight", weights.scale, jnp.ones_like), ("bias", weights.bias, jnp.zeros_like)):
        old = getattr(layer, name)
        if old is None and array is None:
            continue
        array = missing(old) if array is None else array
        if old is None or old.shape != array.shape:
            expected, got = f"{name} of the shape {array.shape}", None if old is None else old.shape
            raise ValueError(f"{_WRITE}: layer must have a {expected}, as the weights, got {got}")
        layer = eqx.tree_at(operator.attrgetter(name), layer, array)
    return layer
