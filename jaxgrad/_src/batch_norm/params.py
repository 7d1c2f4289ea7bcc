"""The static arguments and the sizes of a batch normalization call."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import numpy as np

from jaxgrad._src.choice.candidates import Candidates
from jaxgrad._src.native.ffi import short_dtype
from jaxgrad._src.run.mesh_axes import MeshAxes


@dataclasses.dataclass(frozen=True)
class TrainingOptions:
    """The static arguments of `batch_norm_training`, before an implementation is selected.

    Attributes:
      feature_axis: the axis of the channels, not negative.
      epsilon: added to the variance.
      relu: whether relu is applied to the result.
      statistics_dtype: the dtype of the returned mean and variance.
      implementation: the forced implementation, or None.
      mesh_axes: inside `shard_map`, the devices whose shards make up the batch, or None.
      vmap_axes: the names of axes of `vmap` that are part of the batch.
    """

    feature_axis: int
    epsilon: float
    relu: bool
    statistics_dtype: np.dtype
    implementation: str | None
    mesh_axes: MeshAxes | None
    vmap_axes: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class BatchNormParams:
    """The static arguments of one call.

    Attributes:
      feature_axis: the axis of the channels, not negative.
      epsilon: added to the variance.
      relu: whether relu is applied to the result.
      frozen: whether the mean and the variance are given, as in `jaxgrad.batch_norm_inference`.
      forward_candidates: what may run the forward pass.
      backward_candidates: what may run the backward pass.
      statistics_dtype: the dtype of the returned mean and variance; None if none are returned.
      mesh_axes: inside `shard_map`, the devices whose shards make up the batch; None if x is the whole batch.
      residual: whether the call has a residual, for the text of the call in a tuning; False in the linear passes of
        forward mode, which add a tangent instead.
    """

    feature_axis: int
    epsilon: float
    relu: bool
    frozen: bool
    forward_candidates: Candidates
    backward_candidates: Candidates
    statistics_dtype: Any = None
    mesh_axes: MeshAxes | None = None
    residual: bool = False

    def problem(self, x: jax.Array) -> BatchNormProblem:
        """The problem of an operand x, whose channels or batch `vmap` or a mesh may have changed."""
        flags = {name: getattr(self, name) for name in ("relu", "residual", "frozen")}
        return BatchNormProblem.of(x, self.feature_axis, **flags)

    def pmean(self, arrays: Any) -> Any:
        """Returns the averages of a tree of arrays over the devices of `mesh_axes`."""
        return arrays if self.mesh_axes is None else self.mesh_axes.pmean(arrays)


@dataclasses.dataclass(frozen=True)
class BatchNormProblem:
    """The description of one call that backends are asked about: all that the selection depends on.

    Attributes:
      outer, channels, inner: x, reshaped to [outer, channels, inner].
      dtype: the dtype of x.
      relu: whether relu is applied to the result.
      residual: whether a residual is added to the result.
      frozen: as in `BatchNormParams`.
    """

    outer: int
    channels: int
    inner: int
    dtype: np.dtype
    relu: bool = False
    residual: bool = False
    frozen: bool = False

    @classmethod
    def of(
        cls, x: jax.Array, feature_axis: int, *, relu: bool = False, residual: bool = False, frozen: bool = False
    ) -> BatchNormProblem:
        """The problem of a call."""
        outer, inner = math.prod(x.shape[:feature_axis]), math.prod(x.shape[feature_axis + 1 :])
        return cls(outer, x.shape[feature_axis], inner, x.dtype, relu, residual, frozen)

    def text(self, pass_name: str, platform: str) -> str:
        """The text of a call in a tuning, with its gradients: both passes run on one implementation."""
        op = "batch_norm_inference" if self.frozen else "batch_norm_training"
        x = f"{short_dtype(self.dtype)}[{self.outer},{self.channels},{self.inner}]"
        return f"{op} x={x}{' relu' * self.relu}{' residual' * self.residual}"

    @property
    def size(self) -> int:
        """The number of elements of x."""
        return self.outer * self.channels * self.inner
