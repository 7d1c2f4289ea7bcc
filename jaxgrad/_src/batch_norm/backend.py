"""The interface of the backends of batch normalization.

All implementations save the same residuals, so that any backward pass can follow any forward pass. C is the number of
channels. Every [C] array has the compute dtype: float64 if x is float64, otherwise float32.
"""

from __future__ import annotations

from typing import ClassVar, NamedTuple

import jax
import numpy as np

from jaxgrad._src.batch_norm.params import BatchNormParams
from jaxgrad._src.choice.op import Backend

PASSES = ("forward", "backward")


class Statistics(NamedTuple):
    """The statistics that normalize a batch, each [C].

    `mean_low` is the rounding error of `mean`: the exact mean is close to mean + mean_low. It is None where the caller
    gives the mean.
    """

    mean: jax.Array
    mean_low: jax.Array | None
    rstd: jax.Array  # 1 / sqrt(var + epsilon)


class Gradients(NamedTuple):
    """The gradients of the inputs; None where a gradient is not needed."""

    x: jax.Array | None
    scale: jax.Array | None
    bias: jax.Array | None
    residual: jax.Array | None


def compute_dtype(x: jax.Array) -> np.dtype:
    """Returns the dtype of the arithmetic and of all [C] arrays."""
    return np.dtype(np.float64 if x.dtype == np.float64 else np.float32)


class BatchNormBackend(Backend):
    """Kernels of `batch_norm_training`. A call is described by a `BatchNormProblem`.

    Attributes:
      can_skip_dx: whether `backward` saves time where dx is not needed. If not, XLA computes the other gradients.
    """

    can_skip_dx: ClassVar[bool] = True

    def forward(
        self,
        params: BatchNormParams,
        x: jax.Array,
        scale: jax.Array,
        bias: jax.Array,
        residual: jax.Array | None,
    ) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array]:
        """Returns `(y, mean, mean_low, var, rstd)`, with the biased variance."""
        raise NotImplementedError

    def backward(
        self,
        params: BatchNormParams,
        x: jax.Array,
        scale: jax.Array,
        bias: jax.Array | None,
        statistics: Statistics,
        y: jax.Array | None,
        dy: jax.Array,
        dmean: jax.Array | None,
        dvar: jax.Array | None,
        *,
        needs_grad: tuple[bool, ...],
    ) -> Gradients:
        """Returns the gradients that are needed of (x, scale, bias, residual).

        Args:
          params: the static arguments.
          x: the operand of the forward pass.
          scale: likewise.
          bias: likewise, where relu was applied and there was no residual; otherwise None.
          statistics: from the forward pass.
          y: the result of the forward pass, where relu was applied and there was a residual; otherwise None.
          dy: the cotangent of y.
          dmean: the cotangent of the mean; None for zeros.
          dvar: the cotangent of the variance; None for zeros.
          needs_grad: which gradients are needed.
        """
        raise NotImplementedError


class TwoStepBackend(BatchNormBackend):
    """A backend with separate kernels for the two steps of the forward pass, and with `backward` for frozen statistics.

    `batch_norm_inference`, statistics of several devices and forward mode need the single steps. XLA removes a step
    whose results are not used.
    """

    def statistics(self, params: BatchNormParams, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        """Returns `(mean, mean_low, var, rstd)`, with the biased variance."""
        raise NotImplementedError

    def normalize(
        self,
        params: BatchNormParams,
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
