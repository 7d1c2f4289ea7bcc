"""The interface of the backends of normalization.

Every operand and result of a pass has a first axis of K calls, which is 1 without `vmap`; `params.py` has the other
sizes. The shapes below are

  x, y, residual   [K, *shape], where the first `params.sample_axes` axes of `shape` are samples
  scale, bias      [K, C]
  statistics       [K, *samples, G], with a group for each channel where `params.num_groups` is None

All implementations save the same residuals, so that any backward pass can follow any forward pass. Statistics, scale
and bias have the compute dtype: float64 if x is float64, otherwise float32.
"""

from __future__ import annotations

from typing import ClassVar, NamedTuple

import jax
import numpy as np

from jaxgrad._src.choice.op import Backend
from jaxgrad._src.norm.params import NormParams, NormProblem

PASSES = ("forward", "backward")


class Statistics(NamedTuple):
    """The statistics that normalize a sample.

    `mean_low` is the rounding error of `mean`: the exact mean is close to mean + mean_low. It is None where the caller
    gives the mean. Both are None where no mean is subtracted.
    """

    mean: jax.Array | None
    mean_low: jax.Array | None
    rstd: jax.Array  # 1 / sqrt(var + epsilon)


class Gradients(NamedTuple):
    """The gradients of the inputs; None where a gradient is not needed."""

    x: jax.Array | None
    scale: jax.Array | None
    bias: jax.Array | None
    residual: jax.Array | None


def compute_dtype(x: jax.Array) -> np.dtype:
    """Returns the dtype of the arithmetic, of statistics, scale and bias."""
    return np.dtype(np.float64 if x.dtype == np.float64 else np.float32)


class NormBackend(Backend):
    """Kernels of the passes. A call is described by a `NormProblem`.

    Attributes:
      can_skip_dx: whether `backward` saves time where dx is not needed. If not, XLA computes the other gradients.
    """

    can_skip_dx: ClassVar[bool] = True

    def forward(
        self,
        params: NormParams,
        x: jax.Array,
        scale: jax.Array,
        bias: jax.Array,
        residual: jax.Array | None,
    ) -> tuple[jax.Array, jax.Array | None, jax.Array | None, jax.Array, jax.Array]:
        """Returns `(y, mean, mean_low, var, rstd)`, with the biased variance."""
        raise NotImplementedError

    def backward(
        self,
        params: NormParams,
        x: jax.Array,
        scale: jax.Array,
        bias: jax.Array | None,
        statistics: Statistics,
        y: jax.Array | None,
        residual: jax.Array | None,
        dy: jax.Array,
        dmean: jax.Array | None,
        dvar: jax.Array | None,
        *,
        needs_grad: tuple[bool, ...],
    ) -> Gradients:
        """Returns the gradients that are needed of (x, scale, bias, residual).

        The derivative of an activation follows from its argument, which is computed again from x, scale, bias and
        residual. That of relu with a residual follows from y instead.

        Args:
          params: the static arguments.
          x: the operand of the forward pass.
          scale: likewise.
          bias: likewise, where the argument of the activation is computed again; otherwise None.
          statistics: from the forward pass.
          y: the result of the forward pass, where relu was applied and there was a residual; otherwise None.
          residual: the operand of the forward pass, where silu or gelu was applied and there was one; otherwise None.
          dy: the cotangent of y.
          dmean: the cotangent of the mean; None for zeros.
          dvar: the cotangent of the variance; None for zeros.
          needs_grad: which gradients are needed.
        """
        raise NotImplementedError


class TwoStepBackend(NormBackend):
    """A backend with separate kernels for the two steps of the forward pass, and with `backward` for frozen statistics.

    `batch_norm_inference`, statistics of several devices and forward mode need the single steps. XLA removes a step
    whose results are not used.
    """

    def supports_steps(self, call: NormProblem) -> bool:
        """Whether the kernels of the single steps support a call whose forward pass `supports` accepts."""
        return True

    def statistics(
        self, params: NormParams, x: jax.Array
    ) -> tuple[jax.Array | None, jax.Array | None, jax.Array, jax.Array]:
        """Returns `(mean, mean_low, var, rstd)`, with the biased variance."""
        raise NotImplementedError

    def normalize(
        self,
        params: NormParams,
        x: jax.Array,
        scale: jax.Array,
        bias: jax.Array,
        statistics: Statistics,
        residual: jax.Array | None,
    ) -> jax.Array:
        """Returns y = act(scale * (x - mean) * rstd + bias + residual)."""
        raise NotImplementedError

    def forward(self, params, x, scale, bias, residual):
        mean, mean_low, var, rstd = self.statistics(params, x)
        y = self.normalize(params, x, scale, bias, Statistics(mean, mean_low, rstd), residual)
        return y, mean, mean_low, var, rstd
