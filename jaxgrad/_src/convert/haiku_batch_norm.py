"""Batch normalization of Haiku: the parameters and the state of `hk.BatchNorm`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp

from jaxgrad._src.convert.arrays import as_jax
from jaxgrad._src.convert.batch_norm_weights import (
    BatchNormWeights,
    as_epsilon,
    as_momentum,
    as_steps,
    check_vectors,
    sums_and_steps,
)
from jaxgrad._src.convert.haiku_layers import is_channels_last
from jaxgrad._src.convert.records import check_record

_READ, _WRITE = "jaxgrad.convert.haiku.read_batch_norm", "jaxgrad.convert.haiku.write_batch_norm"
_AVERAGES = ("mean_ema", "var_ema")


def read_batch_norm(
    params: Mapping[str, Any],
    state: Mapping[str, Any],
    name: str = "batch_norm",
    *,
    decay_rate: float,
    eps: float = 1e-5,
    data_format: str = "channels_last",
) -> BatchNormWeights:
    """Reads an `hk.BatchNorm` with the default `axis`.

    Args:
      params: the parameters of the transformed function.
      state: the state of the transformed function.
      name: the name of the module in them.
      decay_rate: the share of the old running statistics in the new ones.
      eps: the number that is added to the variance.
      data_format: the layout of the input, such as "channels_last", "channels_first", "NHWC" or "NCHW".

    Raises:
      TypeError: a parameter is not a floating-point array, or decay_rate or eps is not a number.
      ValueError: there is no such module, decay_rate lies outside [0, 1], eps is negative or not finite, or data_format
        is unknown.
    """
    channels_last = is_channels_last(_READ, data_format)
    for argument, value in (("params", params), ("state", state)):
        if not isinstance(value, Mapping):
            raise TypeError(f"{_READ}: {argument} must be a mapping, got {type(value).__name__}")
    keys = [f"{name}/~/{average}" for average in _AVERAGES]
    if not all(key in state for key in keys):
        found = [key.removesuffix("/~/mean_ema") for key in state if key.endswith("/~/mean_ema")]
        raise ValueError(f"{_READ}: state must have the module {name!r}, got batch normalizations named {found}")
    averages = [_module("state", state, key, entries=("average", "hidden", "counter")) for key in keys]

    def read(array: str, value: Any) -> Any:
        return None if value is None else as_jax(_READ, array, value).reshape(-1)

    own = _module("params", params, name)
    scale, bias = (read(array, own.get(array)) for array in ("scale", "offset"))
    mean, var = (read("average", average["average"]) for average in averages)
    sums = tuple(read("hidden", average["hidden"]) for average in averages)
    hidden = dict(zip(("hidden of mean", "hidden of var"), sums, strict=True))
    check_vectors(_READ, scale=scale, offset=bias, mean=mean, var=var, **hidden)
    return BatchNormWeights(
        scale,
        bias,
        mean,
        var,
        as_steps(_READ, averages[0]["counter"]),
        sums,
        epsilon=as_epsilon(_READ, "eps", eps),
        momentum=as_momentum(_READ, "decay_rate", decay_rate),
        feature_axis=-1 if channels_last else 1,
    )


def _module(argument: str, tree: Mapping[str, Any], name: str, entries: Sequence[str] = ()) -> Mapping[str, Any]:
    """The module with this name in the parameters or the state, or nothing."""
    module = tree.get(name, {})
    if not isinstance(module, Mapping):
        raise TypeError(f"{_READ}: {name} of {argument} must be a mapping, got {type(module).__name__}")
    for entry in entries:
        if module.get(entry) is None:
            raise ValueError(f"{_READ}: {name} of {argument} must have {entry!r}, got {list(module)}")
    return module


def write_batch_norm(
    weights: BatchNormWeights, name: str = "batch_norm", *, rank: int = 4
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the parameters and the state of an `hk.BatchNorm`, which needs `epsilon` and `momentum` of the record.

    Args:
      weights: the record.
      name: the name of the module.
      rank: the rank of the module's input, which the arrays of Haiku have.

    Returns:
      A pair `(params, state)` of dictionaries by module.

    Raises:
      TypeError: weights are not `BatchNormWeights`.
      ValueError: weights of another format have a momentum of 0.9999975 or more.
    """
    check_record(_WRITE, weights, BatchNormWeights)
    shape = [1] * rank
    shape[weights.feature_axis] = -1
    arrays = {"scale": weights.scale, "offset": weights.bias}
    own = {array: value.reshape(shape) for array, value in arrays.items() if value is not None}
    sums, steps = sums_and_steps(_WRITE, weights)
    state = {}
    for average, value, hidden in zip(_AVERAGES, (weights.mean, weights.var), sums, strict=True):
        state[f"{name}/~/{average}"] = {
            "average": value.reshape(shape),
            "counter": steps.astype(jnp.int32),
            "hidden": hidden.reshape(shape),
        }
    return {name: own} if own else {}, state
