"""The calls of normalization that `jaxgrad.tune` measures: value and gradients together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from jaxgrad._src.choice.measured_choices import Measurable
from jaxgrad._src.choice.op import OPS
from jaxgrad._src.choice.selection import measurable_implementations
from jaxgrad._src.norm.backend import compute_dtype
from jaxgrad._src.norm.batch_norm import TRAINING, batch_norm_inference, batch_norm_training
from jaxgrad._src.norm.cudnn import CudnnBackend, loses_digits
from jaxgrad._src.norm.group_norm import GROUP_NORM, group_norm
from jaxgrad._src.norm.layer_norm import LAYER_NORM, layer_norm, rms_norm
from jaxgrad._src.norm.params import NormProblem


def measurable(call: NormProblem, platform: str) -> Measurable:
    """The op and the gradients of x, scale, bias and the residual, on every implementation that supports it.

    Without cuDNN where it is less accurate than XLA: a tuning changes only times.
    """
    p, op = call, OPS[call.op]
    if p.num_groups is None:
        sizes = [p.outer, p.channels, *([] if p.inner == 1 else [p.inner])]
    else:
        sizes = [p.samples, p.channels] if p.is_rows else [p.samples, p.outer, p.channels, p.inner]
    x: Any = jax.ShapeDtypeStruct(tuple(sizes), p.dtype)
    channels = jax.ShapeDtypeStruct((p.channels,), compute_dtype(x))

    def step(implementation: str) -> Callable[..., Any]:
        def value(x, scale, bias, residual=None):
            settings = {"residual": residual, "activation": p.activation, "implementation": implementation}
            if p.frozen:  # scale and bias stand for the statistics too
                return batch_norm_inference(
                    x, scale, bias, bias, scale * scale, feature_axis=1, implementation=implementation
                )
            if op is TRAINING:
                return batch_norm_training(x, scale, bias, feature_axis=1, **settings)[0]
            if op is GROUP_NORM:
                assert p.num_groups is not None
                return group_norm(x, scale, bias, num_groups=p.num_groups, feature_axis=2, **settings)
            return (layer_norm if op is LAYER_NORM else rms_norm)(x, scale, bias, **settings)

        def value_and_gradients(*arrays):
            *primals, dy = arrays
            y, pullback = jax.vjp(value, *primals)
            return y, pullback(dy)

        return value_and_gradients if p.calls == 1 else jax.vmap(value_and_gradients)

    names = measurable_implementations(op, call, platform)
    if loses_digits(call):  # cuDNN computes batch normalization alone
        names = [name for name in names if name != CudnnBackend.implementation]
    operands = [x, channels, channels, *([x] if p.residual else []), x]
    if p.calls != 1:
        operands = [jax.ShapeDtypeStruct((p.calls, *each.shape), each.dtype) for each in operands]
    return Measurable({name: step(name) for name in names}, operands)
