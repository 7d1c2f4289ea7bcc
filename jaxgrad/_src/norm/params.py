"""The static arguments and the sizes of a normalization call, which are the same for every op of the family.

x is [S, O, C, I]: S samples with statistics of their own, C channels, and O and I elements of each channel that a
sample's statistics are computed from. G groups of neighboring channels share statistics.

  batch norm             one sample, and a group for each channel
  group norm             samples along the first axis
  layer norm, RMS norm   a sample for each row: O = I = 1 and G = 1

`vmap` adds K calls with scale and bias of their own: S is a multiple of K.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

from jaxgrad._src.choice.candidates import XLA, Candidates
from jaxgrad._src.native.ffi import short_dtype
from jaxgrad._src.run.mesh_axes import MeshAxes


@dataclasses.dataclass(frozen=True)
class TrainingOptions:
    """The static arguments of `batch_norm_training`, before an implementation is selected.

    Attributes:
      feature_axis: the axis of the channels, not negative.
      epsilon: added to the variance.
      activation: applied to the result; None for no activation.
      statistics_dtype: the dtype of the returned mean and variance.
      implementation: the forced implementation, or None.
      mesh_axes: inside `shard_map`, the devices whose shards make up the batch, or None.
      vmap_axes: the names of axes of `vmap` that are part of the batch.
    """

    feature_axis: int
    epsilon: float
    activation: str | None
    statistics_dtype: np.dtype
    implementation: str | None
    mesh_axes: MeshAxes | None
    vmap_axes: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class NormParams:
    """The static arguments of one call.

    Attributes:
      op: the name of the public op.
      feature_axis: the axis of the channels, not negative, without the axis of calls that the operands of a pass have.
      epsilon: added to the variance.
      activation: applied to the result: "relu", "silu" or "gelu"; None for no activation.
      forward_candidates: what may run the forward pass.
      backward_candidates: what may run the backward pass.
      sample_axes: how many of the first axes are samples.
      num_groups: the groups of channels that share statistics; None if each channel has statistics of its own.
      centered: whether the mean is subtracted. If not, as in RMS norm, there is no mean, and the variance is the mean
        of the squares.
      frozen: whether the mean and the variance are given, as in `jaxgrad.batch_norm_inference`.
      statistics_dtype: the dtype of the returned mean and variance; None if none are returned.
      mesh_axes: inside `shard_map`, the devices whose shards make up the batch; None if x is the whole batch.
      residual: whether the call has a residual, for the text of the call in a tuning; False in the linear passes of
        forward mode, which add a tangent instead.
    """

    op: str
    feature_axis: int
    epsilon: float
    activation: str | None
    forward_candidates: Candidates = XLA
    backward_candidates: Candidates = XLA
    sample_axes: int = 0
    num_groups: int | None = None
    centered: bool = True
    frozen: bool = False
    statistics_dtype: Any = None
    mesh_axes: MeshAxes | None = None
    residual: bool = False

    @property
    def name(self) -> str:
        """The name of the passes: "batch_norm", or the name of the op."""
        return "batch_norm" if self.num_groups is None else self.op

    @property
    def has_smooth_activation(self) -> bool:
        """Whether the derivative of the activation depends on its argument, and not only on the sign of it."""
        return self.activation not in (None, "relu")

    def problem(self, x: Any) -> NormProblem:
        """The problem of an operand x of a pass, [K, *shape], whose sizes `vmap` or a mesh may have changed."""
        calls, *shape = x.shape
        axis = self.feature_axis
        return NormProblem(
            calls=calls,
            samples=math.prod(shape[: self.sample_axes]),
            outer=math.prod(shape[self.sample_axes : axis]),
            channels=shape[axis],
            inner=math.prod(shape[axis + 1 :]),
            num_groups=self.num_groups,
            dtype=x.dtype,
            activation=self.activation,
            residual=self.residual,
            frozen=self.frozen,
            centered=self.centered,
        )

    def results(self, y: Any, mean: Any, var: Any) -> tuple[Any, Any, Any]:
        """Returns the results of the op, or tangents of them. Statistics that the op does not return are None."""
        returned = self.statistics_dtype
        return (y, None, None) if returned is None else (y, mean.astype(returned), var.astype(returned))

    def pmean(self, arrays: Any) -> Any:
        """Returns the averages of a tree of arrays over the devices of `mesh_axes`."""
        return arrays if self.mesh_axes is None else self.mesh_axes.pmean(arrays)


@dataclasses.dataclass(frozen=True)
class NormProblem:
    """The description of one call that backends are asked about: all that the selection depends on.

    Attributes:
      calls: K, the calls with scale and bias of their own.
      samples: the samples of each call.
      outer, channels, inner: x, reshaped to [calls * samples, outer, channels, inner].
      num_groups: as in `NormParams`, like the following ones.
      dtype: the dtype of x.
      activation: applied to the result.
      residual: whether a residual is added before the activation.
      frozen: whether the statistics are given.
      centered: whether the mean is subtracted.
    """

    calls: int
    samples: int
    outer: int
    channels: int
    inner: int
    num_groups: int | None
    dtype: np.dtype
    activation: str | None = None
    residual: bool = False
    frozen: bool = False
    centered: bool = True

    @property
    def op(self) -> str:
        """The op that computes the problem: layer norm for rows of one group, however they were called."""
        if self.num_groups is None:
            return "batch_norm_inference" if self.frozen else "batch_norm_training"
        if not self.centered:
            return "rms_norm"
        return "layer_norm" if self.is_rows else "group_norm"

    @property
    def is_rows(self) -> bool:
        """Whether each sample is one row of channels in one group."""
        return self.num_groups == 1 and self.outer == self.inner == 1

    @property
    def size(self) -> int:
        """The number of elements of x."""
        return self.calls * self.samples * self.outer * self.channels * self.inner

    def text(self, pass_name: str, platform: str) -> str:
        """The text of a call in a tuning, with its gradients: both passes run on one implementation."""
        if self.num_groups is None:
            sizes = [self.outer, self.channels, self.inner]
        elif self.is_rows:
            sizes = [self.samples, self.channels]
        else:
            sizes = [self.samples, self.outer, self.channels, self.inner]
        words = [self.op, f"x={short_dtype(self.dtype)}[{','.join(map(str, sizes))}]"]
        if self.num_groups is not None and not self.is_rows:
            words.append(f"groups={self.num_groups}")
        words += [self.activation] if self.activation else []
        words += ["residual"] * self.residual
        return " ".join(words + [f"calls={self.calls}"] * (self.calls != 1))
