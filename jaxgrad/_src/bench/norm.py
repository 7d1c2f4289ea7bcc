"""Normalization, on jaxgrad and in `jax.numpy`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxgrad._src.bench.call import Pass, shaped, value, value_and_gradients
from jaxgrad._src.choice.explain import Explanation, explain
from jaxgrad._src.norm.batch_norm import batch_norm_training
from jaxgrad._src.norm.group_norm import group_norm
from jaxgrad._src.norm.layer_norm import layer_norm, rms_norm

EPSILON = 1e-5
_OPS: dict[str, Callable[..., Any]] = {
    "batch-norm": batch_norm_training,
    "group-norm": group_norm,
    "layer-norm": layer_norm,
    "rms-norm": rms_norm,
}


@dataclasses.dataclass(frozen=True)
class NormCall:
    """Normalization by the statistics of the operand.

    Attributes:
      text, dtype: as in `Call`.
      shape: of x.
      feature_axis: the axis of the channels.
      activation: "relu", "silu" or "gelu", which follows; None for none.
      kind: "batch-norm", "group-norm", "layer-norm" or "rms-norm". The last two normalize the last axis.
      groups: of group norm.
    """

    text: str
    dtype: str
    shape: tuple[int, ...]
    feature_axis: int = -1
    activation: str | None = None
    kind: str = "batch-norm"
    groups: int = 1

    total = ("forward + backward",)
    one_call_a_program = False

    @property
    def passes(self) -> tuple[Pass, ...]:
        inputs = len(self.operands()) - 1
        return (
            Pass("forward", partial(value, inputs=inputs), (0,)),
            Pass("forward + backward", partial(value_and_gradients, inputs=inputs), (0, 1)),
        )

    def operands(self) -> list[jax.ShapeDtypeStruct]:
        """x, scale, the bias, which RMS norm does not have, and the cotangent of y."""
        channels = [(self.shape[self.feature_axis],)] * (1 if self.kind == "rms-norm" else 2)
        return shaped((self.shape, *channels, self.shape), (self.dtype, *["float32"] * len(channels), self.dtype))

    def deviations(self) -> list[float]:
        return [1.0] * len(self.operands())

    def _call(self) -> Callable[..., Any]:
        settings: dict[str, Any] = {"activation": self.activation, "epsilon": EPSILON}
        if self.kind in ("batch-norm", "group-norm"):
            settings["feature_axis"] = self.feature_axis
        if self.kind == "group-norm":
            settings["num_groups"] = self.groups
        return partial(_OPS[self.kind], **settings)

    def on_jaxgrad(self, *inputs: Any) -> Any:
        found = self._call()(*inputs)
        return found[0] if self.kind == "batch-norm" else found

    def on_xla(self, x: Any, scale: Any, bias: Any = None) -> Any:
        at = self.feature_axis % x.ndim
        others = tuple(axis for axis in range(x.ndim) if axis != at)
        scale, bias = (None if array is None else lax.expand_dims(array, others) for array in (scale, bias))
        wide = x.astype(jnp.float32)
        if self.kind == "batch-norm":
            mean, var = wide.mean(others, keepdims=True), wide.var(others, keepdims=True)
            y = (wide - mean) * (scale * lax.rsqrt(var + EPSILON))
        else:
            grouped = wide
            axes: tuple[int, ...] = (-1,)
            if self.kind == "group-norm":
                grouped = wide.reshape(*x.shape[:at], self.groups, -1, *x.shape[at + 1 :])
                axes = tuple(axis for axis in range(1, grouped.ndim) if axis != at)
            if self.kind != "rms-norm":
                grouped = grouped - grouped.mean(axes, keepdims=True)
            rstd = lax.rsqrt(jnp.mean(lax.square(grouped), axes, keepdims=True) + EPSILON)
            y = (grouped * rstd).reshape(x.shape) * scale
        y = y if bias is None else y + bias
        return (y if self.activation is None else getattr(jax.nn, self.activation)(y)).astype(x.dtype)

    def explanation(self) -> Explanation:
        return explain(self._call(), *self.operands()[:-1])
