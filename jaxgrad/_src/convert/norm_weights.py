"""`jaxgrad.convert.NormWeights`, the record of group, layer, instance and RMS normalization."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp

from jaxgrad._src.convert.batch_norm_weights import as_epsilon
from jaxgrad._src.convert.records import static_field
from jaxgrad._src.core import checks
from jaxgrad._src.core.activations import Activation
from jaxgrad._src.norm.group_norm import group_norm
from jaxgrad._src.norm.layer_norm import layer_norm, rms_norm

Kind = Literal["group", "layer", "instance", "rms"]

# The kind of a layer, by the name of its class, or of its node in ONNX.
KINDS: dict[str, Kind] = {
    "GroupNorm": "group",
    "GroupNormalization": "group",
    "LayerNorm": "layer",
    "LayerNormalization": "layer",
    "InstanceNorm": "instance",
    "InstanceNormalization": "instance",
    "RMSNorm": "rms",
    "RMSNormalization": "rms",
}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class NormWeights:
    """The weights of one group, layer, instance or RMS normalization, and how it is applied.

    A record is a pytree whose leaves are its arrays. Calling the record runs `jaxgrad.group_norm`, `jaxgrad.layer_norm`
    or `jaxgrad.rms_norm` with it.

    Attributes:
      scale: [C] for "group" and "instance", for "layer" and "rms" of the sizes of the normalized axes; None for ones.
      bias: of the shape of scale; None for zeros.
      kind: "group", "layer", "instance" or "rms".
      epsilon: added to the variance, for "rms" to the mean of the squares.
      num_groups: the number of groups for "group", otherwise None.
      axis: for "group" and "instance" the axis of the channels in a batch x, for the others the normalized axes.

    Examples:
      >>> from jaxgrad.convert import NormWeights
      >>> weights = NormWeights(jnp.ones(16), jnp.zeros(16), kind="group", epsilon=1e-5, num_groups=4)
      >>> weights(jnp.ones((8, 32, 32, 16)), activation="silu").shape
      (8, 32, 32, 16)
    """

    scale: jax.Array | None
    bias: jax.Array | None
    kind: Literal["group", "layer", "instance", "rms"] = static_field()
    epsilon: float = static_field()
    num_groups: int | None = static_field(None)
    axis: int | tuple[int, ...] = static_field(-1)

    def __call__(
        self,
        x: jax.typing.ArrayLike,
        *,
        residual: jax.typing.ArrayLike | None = None,
        activation: Activation = None,
        implementation: str | None = None,
    ) -> jax.Array:
        """The normalization of x. The arguments and the errors are those of the op."""
        settings: dict[str, Any] = {
            "epsilon": self.epsilon,
            "residual": residual,
            "activation": activation,
            "implementation": implementation,
        }
        if self.kind in ("layer", "rms"):
            op = layer_norm if self.kind == "layer" else rms_norm
            return op(x, self.scale, self.bias, axis=self.axis, **settings)
        assert isinstance(self.axis, int)
        channels = jnp.shape(x)[self.axis]
        num_groups = channels if self.num_groups is None else self.num_groups
        # ONNX had one scale for each group until opset 21.
        scale, bias = (
            jnp.repeat(a, channels // num_groups) if a is not None and a.size == num_groups < channels else a
            for a in (self.scale, self.bias)
        )
        return group_norm(x, scale, bias, num_groups=num_groups, feature_axis=self.axis, **settings)


def norm_weights(
    function: str,
    kind: Kind,
    scale: jax.Array | None,
    bias: jax.Array | None,
    *,
    epsilon: Any,
    epsilon_name: str = "eps",
    num_groups: Any = None,
    axis: Any = None,
) -> NormWeights:
    """The record of a layer, whose arrays and arguments are checked. axis is None for the last axes."""
    arrays = [a for a in (scale, bias) if a is not None]
    if len({a.shape for a in arrays}) > 1:
        raise ValueError(f"{function}: scale and bias must have one shape, got {[a.shape for a in arrays]}")
    if kind in ("layer", "rms"):
        if axis is None and not arrays:
            raise ValueError(
                f"{function}: the layer must have a scale or a bias, as its axes are those of these arrays"
            )
        axis = tuple(range(-arrays[0].ndim, 0)) if axis is None else (axis,) if isinstance(axis, int) else tuple(axis)
    rank = len(axis) if isinstance(axis, tuple) else 1
    for array in arrays:
        if array.ndim != rank:
            raise ValueError(f"{function}: scale and bias must have rank {rank}, got the shape {array.shape}")
    if kind != "group" and num_groups is not None:
        raise ValueError(f'{function}: the number of groups must be None for kind "{kind}", got {num_groups}')
    if kind == "group":
        num_groups = checks.as_int(function, "the number of groups", num_groups)
        if num_groups < 1 or any(a.size % num_groups for a in arrays):
            shapes = [a.shape for a in arrays]
            raise ValueError(f"{function}: the number of groups must divide the sizes {shapes}, got {num_groups}")
    epsilon = as_epsilon(function, epsilon_name, epsilon)
    return NormWeights(scale, bias, kind=kind, epsilon=epsilon, num_groups=num_groups, axis=axis)


def check_kind(function: str, kind: Any) -> None:
    checks.check_choice(function, "kind", kind, tuple(dict.fromkeys(KINDS.values())))


def kind_of(function: str, layer: Any, library: str) -> Kind:
    """The kind of a layer of a library, or of a subclass of one."""
    for cls in type(layer).__mro__:
        if cls.__module__.partition(".")[0] == library and cls.__name__ in KINDS:
            return KINDS[cls.__name__]
    raise TypeError(
        f"{function}: layer must be a group, layer, instance or RMS normalization of {library}, "
        f"got {type(layer).__name__}"
    )


def axis_of_record(weights: NormWeights) -> tuple[int, ...]:
    return (weights.axis,) if isinstance(weights.axis, int) else weights.axis
