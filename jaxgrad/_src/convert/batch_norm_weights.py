"""`jaxgrad.convert.BatchNormWeights`, the record of batch normalization."""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxgrad._src.convert.records import static_field
from jaxgrad._src.core import checks
from jaxgrad._src.core.activations import Activation
from jaxgrad._src.norm.batch_norm import batch_norm_inference, batch_norm_training

_MOST_STEPS = 1 << 24  # float32 counts to it exactly


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class BatchNormWeights:
    """The weights and the running statistics of one batch normalization, and how it is applied.

    A record is a pytree whose leaves are its arrays. Calling the record normalizes by the running statistics, and the
    method `train` by the statistics of the batch. The gradients of the running statistics are zero. With C channels:

    Attributes:
      scale: [C], or None for ones.
      bias: [C], or None for zeros.
      mean: [C], the running mean.
      var: [C], the running variance.
      steps: the number of updates of the statistics, a scalar of float32, which counts up to 2^24 exactly; None if the
        format does not count them.
      sums: the mean and the variance before the correction that Haiku and equinox make for their initial values, zeros:
        they are mean (1 - momentum^steps) and var (1 - momentum^steps); None for a format without this correction.
      epsilon: added to the variance.
      momentum: the running statistics are `momentum * old + (1 - momentum) * new`. The argument `momentum` of PyTorch
        is 1 - momentum.
      unbiased: whether the running variance takes the unbiased variance of the batch, as in PyTorch.
      feature_axis: the axis of the channels in a batch x.

    Examples:
      >>> from jaxgrad.convert import BatchNormWeights
      >>> weights = BatchNormWeights(jnp.ones(4), jnp.zeros(4), jnp.zeros(4), jnp.ones(4), epsilon=1e-5, momentum=0.9)
      >>> y = weights(jnp.ones((8, 32, 32, 4)))
      >>> y, weights = weights.train(jnp.ones((8, 32, 32, 4)), activation="relu")
      >>> weights.mean
      Array([0.1, 0.1, 0.1, 0.1], dtype=float32)
    """

    scale: jax.Array | None
    bias: jax.Array | None
    mean: jax.Array
    var: jax.Array
    steps: jax.Array | None = None
    sums: tuple[jax.Array, jax.Array] | None = None
    epsilon: float = static_field()
    momentum: float = static_field(0.99)
    unbiased: bool = static_field(False)
    feature_axis: int = static_field(-1)

    def __call__(self, x: jax.typing.ArrayLike, *, implementation: str | None = None) -> jax.Array:
        """`jaxgrad.batch_norm_inference` with the running statistics, which are not differentiated."""
        return batch_norm_inference(
            x,
            *self._affine(),
            lax.stop_gradient(self.mean),
            lax.stop_gradient(self.var),
            feature_axis=self.feature_axis,
            epsilon=self.epsilon,
            implementation=implementation,
        )

    def train(
        self,
        x: jax.typing.ArrayLike,
        *,
        residual: jax.typing.ArrayLike | None = None,
        activation: Activation = None,
        axis_name: str | Sequence[str] | None = None,
        implementation: str | None = None,
    ) -> tuple[jax.Array, BatchNormWeights]:
        """`jaxgrad.batch_norm_training` with these weights.

        Returns:
          The normalized batch, and the record with new running statistics.
        """
        y, mean, var = batch_norm_training(
            x,
            *self._affine(),
            feature_axis=self.feature_axis,
            epsilon=self.epsilon,
            residual=residual,
            activation=activation,
            axis_name=axis_name,
            implementation=implementation,
        )
        if self.unbiased:
            shape = jnp.shape(x)
            count = math.prod(shape) // shape[self.feature_axis]
            if axis_name is not None:
                count = count * lax.axis_size(axis_name if isinstance(axis_name, str) else tuple(axis_name))
            var = var * (count / max(count - 1, 1))
        return y, self._updated(*lax.stop_gradient((mean, var)))

    def _affine(self) -> tuple[jax.Array, jax.Array]:
        scale = jnp.ones_like(self.mean) if self.scale is None else self.scale
        return scale, jnp.zeros_like(scale) if self.bias is None else self.bias

    def _updated(self, *statistics: jax.Array) -> BatchNormWeights:
        old = (self.mean, self.var) if self.sums is None else self.sums
        m = self.momentum
        mean, var = (m * a + (1 - m) * b.astype(a.dtype) for a, b in zip(old, statistics, strict=True))
        steps = None if self.steps is None else self.steps + 1
        if self.sums is None or steps is None:
            return dataclasses.replace(self, mean=mean, var=var, steps=steps)
        correction = 1 - jnp.asarray(m, mean.dtype) ** steps.astype(mean.dtype)
        sums = mean, var
        return dataclasses.replace(self, mean=mean / correction, var=var / correction, steps=steps, sums=sums)


def sums_and_steps(function: str, weights: BatchNormWeights) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
    """The uncorrected statistics and the number of steps, for formats that correct them.

    For a record of another format, so many steps that the correction is none.
    """
    if weights.sums is not None and weights.steps is not None:
        return weights.sums, weights.steps
    momentum = as_momentum(function, "momentum of the weights", weights.momentum)
    enough = {0.0: 1.0, 1.0: math.inf}.get(momentum) or math.log(2.0**-60) / math.log(momentum)
    if enough > _MOST_STEPS:
        raise ValueError(f"{function}: weights must have a momentum below 0.9999975, got {momentum}")
    return (weights.mean, weights.var), jnp.asarray(math.ceil(enough), jnp.float32)


def check_vectors(function: str, **arrays: jax.Array | None) -> None:
    """Checks that the arrays of a record that is read are [C]."""
    given = {name: a.shape for name, a in arrays.items() if a is not None}
    if any(len(shape) != 1 for shape in given.values()) or len(set(given.values())) > 1:
        raise ValueError(f"{function}: the arrays must all have one shape (C,), got {given}")


def as_epsilon(function: str, name: str, value: Any) -> float:
    return _as_number(function, name, value, "a finite number of at least 0", sys.float_info.max)


def as_momentum(function: str, name: str, value: Any) -> float:
    return _as_number(function, name, value, "a number in [0, 1]", 1.0)


def _as_number(function: str, name: str, value: Any, expected: str, most: float) -> float:
    """A float for a static field of a record: it can be neither a traced array nor NaN, which equals nothing."""
    number = value
    is_array = isinstance(value, (np.generic, np.ndarray, jax.Array)) and value.ndim == 0
    if is_array and not isinstance(value, jax.core.Tracer) and not checks.is_key(value):
        number = np.asarray(value).item()
    if isinstance(number, bool) or not isinstance(number, (int, float, np.floating)):
        raise TypeError(f"{function}: {name} must be {expected}, got {type(value).__name__}")
    if not 0 <= number <= most:
        raise ValueError(f"{function}: {name} must be {expected}, got {value!r}")
    return float(number)


def as_steps(function: str, value: Any) -> jax.Array:
    try:
        steps = int(value)
        if steps != value:
            raise ValueError(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise TypeError(f"{function}: the number of steps must be an int, got {value!r}") from error
    if not 0 <= steps <= _MOST_STEPS:
        raise ValueError(f"{function}: the number of steps must lie in [0, 2^24], got {steps}")
    return jnp.asarray(steps, jnp.float32)
