"""Group, layer and RMS normalization of Keras 3."""

from __future__ import annotations

from typing import Any

import numpy as np

from jaxgrad._src.convert.arrays import as_jax
from jaxgrad._src.convert.norm_weights import NormWeights, kind_of, norm_weights
from jaxgrad._src.convert.records import check_record

_READ, _WRITE = "jaxgrad.convert.keras.read_norm", "jaxgrad.convert.keras.write_norm"


def read_norm(layer: Any) -> NormWeights:
    """Reads a built `keras.layers.GroupNormalization`, `LayerNormalization` or `RMSNormalization`.

    Raises:
      TypeError: layer is not one of these.
      ValueError: layer is not built, has `rms_scaling`, or has axes of both signs.
    """
    kind = kind_of(_READ, layer, "keras")
    names = ("scale",) if kind == "rms" else ("gamma", "beta")
    if not all(hasattr(layer, name) for name in names):
        raise ValueError(f"{_READ}: layer must be built, got {type(layer).__name__} without {names[0]}")
    if getattr(layer, "rms_scaling", False):
        raise ValueError(f"{_READ}: layer must have rms_scaling=False, got True")
    arrays = [None if getattr(layer, name) is None else as_jax(_READ, name, getattr(layer, name)) for name in names]
    axis: Any = layer.axis
    if kind != "group" and len({a < 0 for a in axis}) > 1:
        raise ValueError(f"{_READ}: layer must have axes of one sign, got {axis}")
    return norm_weights(
        _READ,
        kind,
        *(*arrays, None)[:2],
        epsilon=layer.epsilon,
        epsilon_name="layer.epsilon",
        num_groups=layer.groups if kind == "group" else None,
        axis=axis,
    )


def write_norm(weights: NormWeights) -> list[np.ndarray]:
    """Returns the weights of a layer of Keras, for `layer.set_weights`.

    The layer needs the arguments of the record, and `scale` or `center` where the record has a scale or a bias.

    Raises:
      TypeError: weights are not `NormWeights`.
    """
    check_record(_WRITE, weights, NormWeights)
    return [np.asarray(array) for array in (weights.scale, weights.bias) if array is not None]
