"""Shared by the group, layer, instance and RMS normalization layers of all frameworks: the op that computes a layer."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp

from jaxgrad._src.nn.batch_norm import computes_in, widen
from jaxgrad._src.norm.group_norm import group_norm
from jaxgrad._src.norm.layer_norm import layer_norm, rms_norm


@dataclasses.dataclass(frozen=True)
class Norm:
    """A normalization that is one call of an op. Axes count from the end, in ascending order.

    Attributes:
      axes: the axes of which a group of statistics consists.
      feature_axes: the axes of scale and bias.
      num_groups: the groups of `jaxgrad.group_norm`; None for a call of `layer_norm` or `rms_norm`.
      centered: whether the mean is subtracted.
    """

    axes: tuple[int, ...]
    feature_axes: tuple[int, ...]
    num_groups: int | None
    centered: bool

    def __call__(
        self, x: jax.Array, scale: jax.Array | None, bias: jax.Array | None, *, dtype: Any, epsilon: float
    ) -> jax.Array:
        """Returns y in `dtype`. scale and bias have the sizes of `feature_axes`, in any shape, or are None."""
        x, scale, bias = widen(x, scale, bias, dtype)
        if self.num_groups is None:
            sizes = [x.shape[axis] for axis in self.axes]
            own = [x.shape[axis] if axis in self.feature_axes else 1 for axis in self.axes]
            scale, bias = (None if a is None else jnp.broadcast_to(a.reshape(own), sizes) for a in (scale, bias))
            y = (layer_norm if self.centered else rms_norm)(x, scale, bias, axis=self.axes, epsilon=epsilon)
            return y.astype(dtype)
        first, end = x.ndim + self.feature_axes[0], x.ndim + self.feature_axes[-1] + 1
        batch = x.ndim - len({*self.axes, *self.feature_axes})
        shape = (math.prod(x.shape[:batch]), *x.shape[batch:first], math.prod(x.shape[first:end]), *x.shape[end:])
        y = group_norm(
            x.reshape(shape),
            *(None if a is None else a.reshape(-1) for a in (scale, bias)),
            num_groups=self.num_groups,
            feature_axis=first - batch + 1,
            epsilon=epsilon,
        )
        return y.reshape(x.shape).astype(dtype)


def find_norm(
    x: jax.Array, axes: Any, feature_axes: Any, *, num_groups: int | None = None, centered: bool = True
) -> Norm | None:
    """The normalization of x as a call of an op, without a transposition; None if no op has this call.

    Args:
      x: the array that is normalized.
      axes: the reduced axes: an int, a slice, or several ints.
      feature_axes: the axes of scale and bias, likewise.
      num_groups: the groups of the features; None for one group, or, if the features are not reduced, for as many as
        there are features.
      centered: whether the mean is subtracted.
    """
    axes, feature_axes = _from_the_end(axes, x.ndim), _from_the_end(feature_axes, x.ndim)
    if axes is None or not feature_axes or not computes_in(x.dtype):
        return None
    reduced, both = set(feature_axes) <= set(axes), sorted({*axes, *feature_axes})
    is_one_axis = feature_axes[-1] - feature_axes[0] == len(feature_axes) - 1
    if both != list(range(-len(both), 0)) or not (reduced or set(axes).isdisjoint(feature_axes)):
        return None
    if num_groups is None and reduced and (axes == feature_axes or not centered or not is_one_axis):
        return Norm(axes, feature_axes, None, centered)
    channels = math.prod(x.shape[axis] for axis in feature_axes)
    groups = (1 if num_groups is None else num_groups) if reduced else channels
    if not centered or not is_one_axis or groups < 1 or channels % groups:
        return None
    return Norm(axes, feature_axes, groups, centered)


def find_instance_norm(x: jax.Array, feature_axes: Any) -> Norm | None:
    """As `find_norm`, for the statistics over all axes but the first one and those of the features, as in flax."""
    features = _from_the_end(feature_axes, x.ndim)
    if features is None or -x.ndim in features:
        return None
    return find_norm(x, [axis for axis in range(1 - x.ndim, 0) if axis not in features], features)


def _from_the_end(axes: Any, ndim: int) -> tuple[int, ...] | None:
    """Axes as negative ints, each once, in ascending order; None if one is out of range."""
    if isinstance(axes, slice):
        axes = range(ndim)[axes]
    axes = tuple(axes) if isinstance(axes, Iterable) else (axes,)
    if not all(-ndim <= axis < ndim for axis in axes):
        return None
    return tuple(sorted({axis % ndim - ndim for axis in axes}))
