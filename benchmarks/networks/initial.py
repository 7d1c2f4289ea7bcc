"""A network's initial parameters, outputs and operations, from its description alone."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.networks.jax_ops import LaxOps
from benchmarks.networks.ops import Conv, ConvTranspose, Window


class Described(NamedTuple):
    """A network on an input of some shape.

    Attributes:
      params: of each layer, in the order in which the network asks for them; drawn from a fixed seed.
      features: of each batch normalization.
      output: the shape and dtype of what the network returns.
      flops: of a training step's convolutions: forward and two gradients for each, but no input gradient for the first.
      asymmetric: whether a convolution has more padding at one end of an axis than at the other.
      transposed: whether it has a transposed convolution.
      pooled: whether it has a max pooling.
    """

    params: list[Any]
    features: list[int]
    output: jax.ShapeDtypeStruct
    flops: int
    asymmetric: bool
    transposed: bool
    pooled: bool


def describe(network: Callable[..., Any], x: jax.ShapeDtypeStruct) -> Described:
    ops = _Describing()
    output = jax.eval_shape(lambda x: network(ops, x), x)
    params = jax.tree.map(jnp.asarray, ops.params)
    features = [mean.size for mean, _ in ops.statistics]
    flops = 3 * sum(ops.forward_flops) - ops.forward_flops[0]
    transposed = any(isinstance(layer, ConvTranspose) for layer in params)
    return Described(params, features, output, flops, ops.asymmetric, transposed, ops.pooled)


class _Describing(LaxOps):
    """Makes each layer's parameters as the network asks for them, from the shapes of its inputs."""

    def __init__(self) -> None:
        super().__init__(())
        self.params: list[Any] = []
        self.forward_flops: list[int] = []
        self.asymmetric = self.pooled = False
        self._rng = np.random.default_rng(0)

    def _layer(self, initial: Callable[[np.random.Generator], Any]) -> Any:
        self.params.append(initial(self._rng))
        return self.params[-1]

    def _conv(self, x: jax.Array, layer: Conv, window: Window, relu: bool) -> jax.Array:
        y = super()._conv(x, layer, window, relu)
        self.forward_flops.append(2 * y.size * math.prod(layer.w.shape[:-1]))
        self.asymmetric = self.asymmetric or len(set(window.pads)) > 1
        return y

    def _conv_transpose(self, x: jax.Array, layer: ConvTranspose, stride: int) -> jax.Array:
        self.forward_flops.append(2 * x.size * math.prod(layer.w.shape) // x.shape[-1])
        return super()._conv_transpose(x, layer, stride)

    def max_pool(self, x: jax.Array, size: int, stride: int, padding: int = 0) -> jax.Array:
        self.pooled = True
        return super().max_pool(x, size, stride, padding)
