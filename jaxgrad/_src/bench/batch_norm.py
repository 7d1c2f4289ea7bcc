"""Batch normalization, on jaxgrad and in `jax.numpy`."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxgrad._src.bench.call import Pass, shaped, value, value_and_gradients
from jaxgrad._src.choice.explain import Explanation, explain
from jaxgrad._src.norm.batch_norm import batch_norm_training

EPSILON = 1e-5


@dataclasses.dataclass(frozen=True)
class BatchNormCall:
    """Batch normalization by the statistics of the batch.

    Attributes:
      text, dtype: as in `Call`.
      shape: of x.
      feature_axis: the axis of the channels.
      relu: whether relu follows.
    """

    text: str
    dtype: str
    shape: tuple[int, ...]
    feature_axis: int
    relu: bool

    passes = (
        Pass("forward", partial(value, inputs=3), (0,)),
        Pass("forward + backward", partial(value_and_gradients, inputs=3), (0, 1)),
    )
    total = ("forward + backward",)
    one_call_a_program = False

    def operands(self) -> list[jax.ShapeDtypeStruct]:
        """x, scale, bias and the cotangent of y."""
        channels = (self.shape[self.feature_axis],)
        return shaped((self.shape, channels, channels, self.shape), (self.dtype, "float32", "float32", self.dtype))

    def deviations(self) -> list[float]:
        return [1.0] * 4

    def _settings(self) -> dict[str, Any]:
        return {"feature_axis": self.feature_axis, "activation": "relu" if self.relu else None}

    def on_jaxgrad(self, x: Any, scale: Any, bias: Any) -> Any:
        return batch_norm_training(x, scale, bias, **self._settings())[0]

    def on_xla(self, x: Any, scale: Any, bias: Any) -> Any:
        axes = tuple(axis for axis in range(x.ndim) if axis != self.feature_axis)
        scale, bias = (lax.expand_dims(array, axes) for array in (scale, bias))
        wide = x.astype(jnp.float32)
        mean, var = wide.mean(axes, keepdims=True), wide.var(axes, keepdims=True)
        y = (wide - mean) * (scale * lax.rsqrt(var + EPSILON)) + bias
        return (jax.nn.relu(y) if self.relu else y).astype(x.dtype)

    def explanation(self) -> Explanation:
        return explain(batch_norm_training, *self.operands()[:3], **self._settings())
