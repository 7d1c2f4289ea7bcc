"""Group, layer, instance and RMS normalization of PyTorch: the state dicts of `torch.nn.GroupNorm` and the like."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxgrad._src.convert.norm_weights import Kind, NormWeights, check_kind, norm_weights
from jaxgrad._src.convert.records import check_record
from jaxgrad._src.convert.torch_parameters import read_parameter

_READ, _WRITE = "jaxgrad.convert.torch.read_norm", "jaxgrad.convert.torch.write_norm"


def read_norm(
    state_dict: Mapping[str, Any],
    prefix: str = "",
    *,
    kind: Kind,
    num_groups: int | None = None,
    eps: float | None = None,
) -> NormWeights:
    """Reads the state dict of a `torch.nn.GroupNorm`, `LayerNorm`, `InstanceNorm1d` to `InstanceNorm3d` or `RMSNorm`.

    Args:
      state_dict: the state dict of the layer or of a module that contains it; tensors or arrays.
      prefix: the path of the layer within the module with a final dot, such as "encoder.norm1.".
      kind: "group", "layer", "instance" or "rms". The other arguments are those of the layer.
      num_groups: for "group" the number of groups.
      eps: None for the default of PyTorch, 1e-5, or for "rms" the machine epsilon of the dtype in which it computes.

    Raises:
      TypeError: state_dict is not a mapping, a value is not a floating-point array, or a number has the wrong type.
      ValueError: there is no layer with a weight with this prefix, it has running statistics, kind is unknown,
        num_groups does not divide the channels, or eps is negative or not finite.
    """
    check_kind(_READ, kind)
    scale = read_parameter(_READ, state_dict, prefix, "weight")
    bias = read_parameter(_READ, state_dict, prefix, "bias", optional=True)
    if f"{prefix}running_mean" in state_dict:
        raise ValueError(f"{_READ}: the layer must have track_running_stats=False, got {prefix}running_mean")
    if eps is None:
        eps = default_rms_epsilon(scale.dtype) if kind == "rms" else 1e-5
    axis = 1 if kind in ("group", "instance") else None
    return norm_weights(_READ, kind, scale, bias, epsilon=eps, num_groups=num_groups, axis=axis)


def default_rms_epsilon(dtype: Any) -> float:
    """PyTorch's: the machine epsilon of the dtype of the arithmetic, which is float32 for 16-bit dtypes."""
    return float(jnp.finfo(jnp.promote_types(dtype, jnp.float32)).eps)


def write_norm(weights: NormWeights, prefix: str = "") -> dict[str, jax.Array]:
    """Returns the state dict of a layer of PyTorch, which needs `eps` and the groups of the record.

    Load it as that of `jaxgrad.convert.torch.write_batch_norm`.

    Args:
      weights: the record.
      prefix: put before each key, such as "encoder.norm1.".

    Raises:
      TypeError: weights are not `NormWeights`.
    """
    check_record(_WRITE, weights, NormWeights)
    arrays = {"weight": weights.scale, "bias": weights.bias}
    return {f"{prefix}{name}": array for name, array in arrays.items() if array is not None}
