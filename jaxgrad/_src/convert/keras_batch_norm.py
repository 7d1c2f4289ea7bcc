"""Batch normalization of Keras 3: `keras.layers.BatchNormalization`."""

from __future__ import annotations

from typing import Any

import numpy as np

from jaxgrad._src.convert.arrays import as_jax
from jaxgrad._src.convert.batch_norm_weights import (
    BatchNormWeights,
    as_epsilon,
    as_momentum,
    check_vectors,
)
from jaxgrad._src.convert.records import check_record

_READ, _WRITE = "jaxgrad.convert.keras.read_batch_norm", "jaxgrad.convert.keras.write_batch_norm"


def read_batch_norm(layer: Any) -> BatchNormWeights:
    """Reads a built `keras.layers.BatchNormalization`.

    Raises:
      ValueError: layer is not such a layer, is not built, or has `renorm`.
    """
    if getattr(layer, "moving_mean", None) is None or not hasattr(layer, "gamma"):
        raise ValueError(f"{_READ}: layer must be a built keras.layers.BatchNormalization, got {type(layer).__name__}")
    if getattr(layer, "renorm", False):
        raise ValueError(f"{_READ}: layer must have renorm=False, got True")
    names = ("gamma", "beta", "moving_mean", "moving_variance")
    scale, bias, mean, var = (
        None if getattr(layer, name) is None else as_jax(_READ, name, getattr(layer, name)) for name in names
    )
    assert mean is not None
    assert var is not None
    check_vectors(_READ, gamma=scale, beta=bias, moving_mean=mean, moving_variance=var)
    return BatchNormWeights(
        scale,
        bias,
        mean,
        var,
        epsilon=as_epsilon(_READ, "layer.epsilon", layer.epsilon),
        momentum=as_momentum(_READ, "layer.momentum", layer.momentum),
        feature_axis=layer.axis,
    )


def write_batch_norm(weights: BatchNormWeights) -> list[np.ndarray]:
    """Returns the weights of a `keras.layers.BatchNormalization`, for `layer.set_weights`.

    The layer needs `epsilon` and `momentum` of the record, and `scale` or `center` where it has a scale or a bias.

    Raises:
      TypeError: weights are not `BatchNormWeights`.
    """
    check_record(_WRITE, weights, BatchNormWeights)
    arrays = (weights.scale, weights.bias, weights.mean, weights.var)
    return [np.asarray(array) for array in arrays if array is not None]
