"""Batch normalization of equinox: `eqx.nn.BatchNorm` and its state."""

from __future__ import annotations

from typing import Any

import equinox as eqx
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
from jaxgrad._src.convert.records import check_record

_READ, _WRITE = "jaxgrad.convert.equinox.read_batch_norm", "jaxgrad.convert.equinox.write_batch_norm"


def read_batch_norm(layer: Any, state: eqx.nn.State) -> BatchNormWeights:
    """Reads an `eqx.nn.BatchNorm`, and its running statistics from the state of the model.

    `train` of the record normalizes by the batch, as `mode="batch"` does; in the mode "ema" equinox normalizes by the
    running statistics, also in training.

    Args:
      layer: an `eqx.nn.BatchNorm`.
      state: the state of the model.

    Raises:
      TypeError: layer is not an `eqx.nn.BatchNorm`.
      ValueError: the mode is "ema" and the layer was never trained, so that it has no statistics.
    """
    if not isinstance(layer, eqx.nn.BatchNorm):
        raise TypeError(f"{_READ}: layer must be an equinox.nn.BatchNorm, got {type(layer).__name__}")
    arguments: Any = layer  # whose indices may be None
    scale, bias = (
        None if array is None else as_jax(_READ, name, array)
        for name, array in (("weight", layer.weight), ("bias", layer.bias))
    )
    sums = steps = None
    if arguments.mode == "ema":
        if bool(state.get(arguments.ema_first_time_index)):
            raise ValueError(f"{_READ}: state must have running statistics, but the layer was never trained")
        mean, var = (as_jax(_READ, "state", array) for array in state.get(arguments.ema_state_index))
    else:
        sums = tuple(as_jax(_READ, "state", array) for array in state.get(arguments.batch_state_index))
        counter = state.get(arguments.batch_counter)
        correction = jnp.where(counter == 0, 1, 1 - arguments.momentum**counter)  # as equinox computes it
        mean, var = (array / correction for array in sums)
        steps = as_steps(_READ, counter)
    check_vectors(_READ, weight=scale, bias=bias, mean=mean, var=var)
    return BatchNormWeights(
        scale,
        bias,
        mean,
        var,
        steps,
        sums,  # type: ignore[arg-type]
        epsilon=as_epsilon(_READ, "layer.eps", layer.eps),
        momentum=as_momentum(_READ, "layer.momentum", layer.momentum),
        feature_axis=1,
    )


def write_batch_norm(
    weights: BatchNormWeights, layer: eqx.nn.BatchNorm, state: eqx.nn.State
) -> tuple[eqx.nn.BatchNorm, eqx.nn.State]:
    """Returns a layer of equinox and a state with the arrays of the record.

    Args:
      weights: the record.
      layer: a layer with the same arguments.
      state: the state of the model, of which the running statistics of the layer are replaced. As with every update of
        a state in equinox, the old one can no longer be used.

    Raises:
      TypeError: weights are not `BatchNormWeights`, or layer is not an `eqx.nn.BatchNorm`.
      ValueError: layer has another size, `eps` or `momentum`, or has `channelwise_affine` where the record has not;
        or, in the mode "batch", weights of another format have a momentum of 0.9999975 or more.
    """
    check_record(_WRITE, weights, BatchNormWeights)
    if not isinstance(layer, eqx.nn.BatchNorm):
        raise TypeError(f"{_WRITE}: layer must be an equinox.nn.BatchNorm, got {type(layer).__name__}")
    own = (weights.mean.size, weights.epsilon, weights.momentum, weights.scale is not None or weights.bias is not None)
    names = ("input_size", "eps", "momentum", "channelwise_affine")
    for name, value in zip(names, own, strict=True):
        if getattr(layer, name) != value:
            raise ValueError(f"{_WRITE}: layer must have {name}={value} of the weights, got {getattr(layer, name)}")
    if layer.channelwise_affine:
        scale, bias = weights.scale, weights.bias
        pair = (
            jnp.ones_like(weights.mean) if scale is None else scale,
            jnp.zeros_like(weights.mean) if bias is None else bias,
        )
        layer = eqx.tree_at(lambda layer: (layer.weight, layer.bias), layer, pair)
    return layer, _write_state(weights, layer, state)


def _write_state(weights: BatchNormWeights, layer: Any, state: Any) -> Any:
    if layer.mode == "ema":
        state = state.set(layer.ema_first_time_index, jnp.array(False))
        return state.set(layer.ema_state_index, (weights.mean, weights.var))
    sums, steps = sums_and_steps(_WRITE, weights)
    counter = state.get(layer.batch_counter)
    state = state.set(layer.batch_counter, 0 * counter + int(steps))  # of the same type, which may be weak
    return state.set(layer.batch_state_index, sums)
