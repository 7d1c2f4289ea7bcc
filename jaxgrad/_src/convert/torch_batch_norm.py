"""Batch normalization of PyTorch: the state dicts of `torch.nn.BatchNorm1d` to `BatchNorm3d`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from jaxgrad._src.convert.batch_norm_weights import (
    BatchNormWeights,
    as_epsilon,
    as_momentum,
    as_steps,
    check_vectors,
)
from jaxgrad._src.convert.records import check_record
from jaxgrad._src.convert.torch_parameters import read_parameter

_READ, _WRITE = "jaxgrad.convert.torch.read_batch_norm", "jaxgrad.convert.torch.write_batch_norm"


def read_batch_norm(
    state_dict: Mapping[str, Any], prefix: str = "", *, eps: float = 1e-5, momentum: float = 0.1
) -> BatchNormWeights:
    """Reads the state dict of a `torch.nn.BatchNorm1d`, `BatchNorm2d`, `BatchNorm3d` or `SyncBatchNorm`.

    Args:
      state_dict: the state dict of the layer or of a module that contains it; tensors or arrays.
      prefix: the path of the layer within the module with a final dot, such as "encoder.bn1.".
      eps: the number that is added to the variance.
      momentum: the share of the new statistics in the running ones.

    Raises:
      TypeError: state_dict is not a mapping, a value is not a floating-point array, or eps or momentum is not a number.
      ValueError: there is no layer with running statistics with this prefix, momentum is None or lies outside [0, 1],
        or eps is negative or not finite.
    """
    if momentum is None:
        raise ValueError(f"{_READ}: momentum must be a number, got None, which stands for the average of all batches")
    mean, var = (read_parameter(_READ, state_dict, prefix, name) for name in ("running_mean", "running_var"))
    scale, bias = (read_parameter(_READ, state_dict, prefix, name, optional=True) for name in ("weight", "bias"))
    check_vectors(_READ, weight=scale, bias=bias, running_mean=mean, running_var=var)
    steps = state_dict.get(f"{prefix}num_batches_tracked")
    return BatchNormWeights(
        scale,
        bias,
        mean,
        var,
        None if steps is None else as_steps(_READ, steps),
        epsilon=as_epsilon(_READ, "eps", eps),
        momentum=1 - as_momentum(_READ, "momentum", momentum),
        unbiased=True,
        feature_axis=1,
    )


def write_batch_norm(weights: BatchNormWeights, prefix: str = "") -> dict[str, jax.Array | np.ndarray]:
    """Returns the state dict of a `torch.nn.BatchNorm1d`, `BatchNorm2d` or `BatchNorm3d`.

    Load it by `module.load_state_dict({key: torch.from_dlpack(array) for key, array in state_dict.items()})`, and give
    the module `eps` and `momentum` of the record: PyTorch's momentum is 1 - `weights.momentum`.

    Args:
      weights: the record.
      prefix: put before each key, such as "encoder.bn1.".

    Returns:
      A dictionary of arrays of JAX; the count "num_batches_tracked" is one of NumPy, of int64.

    Raises:
      TypeError: weights are not `BatchNormWeights`.
    """
    check_record(_WRITE, weights, BatchNormWeights)
    arrays = {
        "weight": weights.scale,
        "bias": weights.bias,
        "running_mean": weights.mean,
        "running_var": weights.var,
        "num_batches_tracked": np.asarray(0 if weights.steps is None else weights.steps).astype(np.int64),
    }
    return {f"{prefix}{name}": array for name, array in arrays.items() if array is not None}
