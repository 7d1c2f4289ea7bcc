"""The calls of batch normalization that `jaxgrad.tune` measures: value and gradients together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from jaxgrad._src.choice.measured_choices import Measurable
from jaxgrad._src.choice.selection import measurable_implementations
from jaxgrad._src.norm.backend import compute_dtype
from jaxgrad._src.norm.batch_norm import INFERENCE, TRAINING, batch_norm_inference, batch_norm_training
from jaxgrad._src.norm.cudnn import CudnnBackend, loses_digits
from jaxgrad._src.norm.params import NormProblem


def measurable(call: NormProblem, platform: str) -> Measurable:
    """The op and the gradients of x, scale, bias and the residual, on every implementation that supports it.

    Without cuDNN where it is less accurate than XLA: a tuning changes only times.
    """
    p = call
    x: Any = jax.ShapeDtypeStruct((p.outer, p.channels, *([] if p.inner == 1 else [p.inner])), p.dtype)
    channels = jax.ShapeDtypeStruct((p.channels,), compute_dtype(x))

    def step(implementation: str) -> Callable[..., Any]:
        def value(x, scale, bias, residual=None):
            if p.frozen:  # scale and bias stand for the statistics too
                return batch_norm_inference(
                    x, scale, bias, bias, scale * scale, feature_axis=1, implementation=implementation
                )
            return batch_norm_training(
                x,
                scale,
                bias,
                feature_axis=1,
                residual=residual,
                activation=p.activation,
                implementation=implementation,
            )[0]

        def value_and_gradients(*arrays):
            *primals, dy = arrays
            y, pullback = jax.vjp(value, *primals)
            return y, pullback(dy)

        return value_and_gradients if p.calls == 1 else jax.vmap(value_and_gradients)

    names = measurable_implementations(INFERENCE if p.frozen else TRAINING, call, platform)
    if loses_digits(call):
        names = [name for name in names if name != CudnnBackend.implementation]
    operands = [x, channels, channels, *([x] if p.residual else []), x]
    if p.calls != 1:
        operands = [jax.ShapeDtypeStruct((p.calls, *each.shape), each.dtype) for each in operands]
    return Measurable({name: step(name) for name in names}, operands)
