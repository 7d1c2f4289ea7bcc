"""The operations in JAX, on jax.lax and jax.numpy alone or with those of jaxgrad. Activations are [N, ..., C]."""

from __future__ import annotations

import dataclasses
import itertools
from functools import reduce
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

import jaxgrad
from benchmarks import flax_norm
from benchmarks.networks.ops import (
    BATCH_NORM_EPSILON,
    GROUP_NORM_EPSILON,
    GROUPS,
    LAYER_NORM_EPSILON,
    Conv,
    ConvTranspose,
    Dense,
    Norm,
    Ops,
    Scale,
    Window,
)


class LaxOps(Ops):
    """jax.lax and jax.numpy, differentiated by `jax.grad` and fused by XLA."""

    def _conv(self, x: jax.Array, layer: Conv, window: Window, relu: bool) -> jax.Array:
        y = lax.conv_general_dilated(x, layer.w, **_settings(x, window))
        y = y if layer.bias is None else y + layer.bias
        return jax.nn.relu(y) if relu else y

    def _conv_transpose(self, x: jax.Array, layer: ConvTranspose, stride: int) -> jax.Array:
        strides = (stride,) * (x.ndim - 2)
        return lax.conv_transpose(x, layer.w, strides, "VALID", dimension_numbers=_layouts(x)) + layer.bias

    def _batch_norm(self, x: jax.Array, layer: Norm, residual: jax.Array | None, activation: str | None) -> jax.Array:
        """As in Flax: in float32, and both moments in one pass."""
        axes, wide = tuple(range(x.ndim - 1)), x.astype(jnp.float32)
        mean = wide.mean(axes)
        var = jnp.maximum(jnp.square(wide).mean(axes) - jnp.square(mean), 0)
        self.statistics.append((mean, var))
        y = (wide - mean) * (layer.scale * lax.rsqrt(var + BATCH_NORM_EPSILON)) + layer.bias
        y = y.astype(x.dtype) if residual is None else (y + residual).astype(x.dtype)
        return y if activation is None else getattr(jax.nn, activation)(y)

    def _layer_norm(self, x: jax.Array, layer: Norm) -> jax.Array:
        wide = x.astype(jnp.float32)
        mean = wide.mean(-1, keepdims=True)
        var = jnp.square(wide - mean).mean(-1, keepdims=True)
        y = (wide - mean) * lax.rsqrt(var + LAYER_NORM_EPSILON) * layer.scale + layer.bias
        return y.astype(x.dtype)

    def _group_norm(self, x: jax.Array, layer: Norm, activation: str | None) -> jax.Array:
        settings: dict[str, Any] = {"epsilon": GROUP_NORM_EPSILON, "groups": GROUPS}
        y = flax_norm.normalized("group-norm", x, layer.scale, layer.bias, **settings)
        return y if activation is None else getattr(jax.nn, activation)(y)

    def _dense(self, x: jax.Array, layer: Dense) -> jax.Array:
        return x @ layer.w + layer.bias

    def _scale(self, x: jax.Array, layer: Scale) -> jax.Array:
        return x * layer.scale

    def _attention(self, queries: jax.Array, keys: jax.Array, values: jax.Array, heads: int) -> jax.Array:
        def by_head(x: jax.Array) -> jax.Array:
            return x.reshape(x.shape[0], -1, heads, x.shape[-1] // heads)

        return jax.nn.dot_product_attention(by_head(queries), by_head(keys), by_head(values)).reshape(queries.shape)

    def relu(self, x: jax.Array) -> jax.Array:
        return jax.nn.relu(x)

    def silu(self, x: jax.Array) -> jax.Array:
        return jax.nn.silu(x)

    def gelu(self, x: jax.Array) -> jax.Array:
        return jax.nn.gelu(x, approximate=False)

    def tanh(self, x: jax.Array) -> jax.Array:
        return jnp.tanh(x)

    def sigmoid(self, x: jax.Array) -> jax.Array:
        return jax.nn.sigmoid(x)

    def concatenate(self, *xs: jax.Array) -> jax.Array:
        return jnp.concatenate(xs, -1)

    def halves(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        first, second = jnp.split(x, 2, -1)
        return first, second

    def at_each_position(self, values: jax.Array, x: jax.Array) -> jax.Array:
        return lax.expand_dims(values, range(1, x.ndim - 1))

    def time_embedding(self, x: jax.Array, features: int) -> jax.Array:
        times = 1000 / x.shape[0] * jnp.arange(x.shape[0])
        angles = times[:, None] * 1e-4 ** jnp.linspace(0, 1, features // 2)
        return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], -1).astype(x.dtype)

    def upsample(self, x: jax.Array) -> jax.Array:
        return jax.image.resize(x, _upsampled(x), "nearest")

    def max_pool(self, x: jax.Array, size: int, stride: int, padding: int = 0) -> jax.Array:
        n = x.ndim - 2
        pads = ((0, 0), *((padding, padding),) * n, (0, 0))
        return lax.reduce_window(x, -jnp.inf, lax.max, (1, *(size,) * n, 1), (1, *(stride,) * n, 1), pads)

    def mean(self, x: jax.Array) -> jax.Array:
        return x.mean(tuple(range(1, x.ndim - 1)))


class PaddedLaxOps(LaxOps):
    """Asymmetric padding by jnp.pad before the convolution, as Flax pads causal ones."""

    def _conv(self, x: jax.Array, layer: Conv, window: Window, relu: bool) -> jax.Array:
        if len(set(window.pads)) > 1:
            x = jnp.pad(x, ((0, 0), *(window.pads,) * (x.ndim - 2), (0, 0)))
            window = dataclasses.replace(window, padding="none")
        return super()._conv(x, layer, window, relu)


class SlicedLaxOps(LaxOps):
    """Max pooling as the maximum of slices, whose gradient XLA computes faster than that of lax.reduce_window."""

    def max_pool(self, x: jax.Array, size: int, stride: int, padding: int = 0) -> jax.Array:
        n = x.ndim - 2
        padded = jnp.pad(x, ((0, 0), *((padding, padding),) * n, (0, 0)), constant_values=-jnp.inf)
        lasts = [length - size for length in padded.shape[1:-1]]
        slices = (
            padded[(slice(None), *(slice(i, last + i + 1, stride) for i, last in zip(at, lasts, strict=True)))]
            for at in itertools.product(range(size), repeat=n)
        )
        return reduce(jnp.maximum, slices)


class JaxgradConvolutionOps(LaxOps):
    """The convolutions of jaxgrad, else jax.lax and jax.numpy."""

    def _conv(self, x: jax.Array, layer: Conv, window: Window, relu: bool) -> jax.Array:
        activation = "relu" if relu else None
        return jaxgrad.conv_general_dilated(x, layer.w, bias=layer.bias, activation=activation, **_settings(x, window))

    def _conv_transpose(self, x: jax.Array, layer: ConvTranspose, stride: int) -> jax.Array:
        settings: dict[str, Any] = {"dimension_numbers": _layouts(x), "bias": layer.bias}
        return jaxgrad.conv_transpose(x, layer.w, (stride,) * (x.ndim - 2), "VALID", **settings)


class JaxgradOps(JaxgradConvolutionOps):
    """jaxgrad's ops where it has them, else jax.lax and jax.numpy."""

    def _batch_norm(self, x: jax.Array, layer: Norm, residual: jax.Array | None, activation: str | None) -> jax.Array:
        y, *statistics = jaxgrad.batch_norm_training(
            x, layer.scale, layer.bias, epsilon=BATCH_NORM_EPSILON, residual=residual, activation=activation
        )
        self.statistics.append(tuple(statistics))
        return y

    def _layer_norm(self, x: jax.Array, layer: Norm) -> jax.Array:
        return jaxgrad.layer_norm(x, layer.scale, layer.bias, epsilon=LAYER_NORM_EPSILON)

    def _group_norm(self, x: jax.Array, layer: Norm, activation: str | None) -> jax.Array:
        settings: dict[str, Any] = {"epsilon": GROUP_NORM_EPSILON, "num_groups": GROUPS, "activation": activation}
        return jaxgrad.group_norm(x, layer.scale, layer.bias, **settings)

    def upsample(self, x: jax.Array) -> jax.Array:
        return jaxgrad.resize(x, _upsampled(x), "nearest")

    def max_pool(self, x: jax.Array, size: int, stride: int, padding: int = 0) -> jax.Array:
        n = x.ndim - 2
        return jaxgrad.max_pool(x, (size,) * n, (stride,) * n, ((padding, padding),) * n)


def _upsampled(x: jax.Array) -> tuple[int, ...]:
    return (x.shape[0], *(2 * size for size in x.shape[1:-1]), x.shape[-1])


def _settings(x: jax.Array, window: Window) -> dict[str, Any]:
    n = x.ndim - 2
    return {
        "window_strides": (window.stride,) * n,
        "padding": (window.pads,) * n,
        "rhs_dilation": (window.dilation,) * n,
        "dimension_numbers": _layouts(x),
        "feature_group_count": window.groups,
    }


def _layouts(x: jax.Array) -> tuple[str, str, str]:
    axes = "DHW"[5 - x.ndim :]
    return f"N{axes}C", f"{axes}IO", f"N{axes}C"
