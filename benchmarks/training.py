"""A training step in JAX: loss, gradients, SGD with momentum, and the running statistics of batch normalization."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.networks import CLASSES, Network
from benchmarks.networks.initial import Described
from benchmarks.networks.jax_ops import LaxOps

LEARNING_RATE, MOMENTUM, STATISTICS_MOMENTUM = 0.01, 0.9, 0.9


class State(NamedTuple):
    """The state that a training step takes and returns."""

    params: list[Any]  # of each layer, in the dtype of the activations; float32 for batch normalization
    velocity: list[Any]
    statistics: list[tuple[Any, Any]]  # the running (mean, var) [C] of each batch normalization


def arguments(network: Network, described: Described, x: jax.ShapeDtypeStruct) -> tuple[State, jax.Array, jax.Array]:
    """The first state and one batch. The velocity is zero, so the velocity after one step equals the gradients."""
    rng = np.random.default_rng(1)

    def normal(like: jax.ShapeDtypeStruct) -> jax.Array:
        return jnp.asarray(rng.standard_normal(like.shape, np.float32), like.dtype)

    params = jax.tree.map(jnp.copy, described.params)  # a step may donate this memory
    statistics = [(jnp.zeros(count), jnp.ones(count)) for count in described.features]
    state = State(params, jax.tree.map(jnp.zeros_like, params), statistics)
    if network.classifies:
        return state, normal(x), jnp.asarray(rng.integers(0, CLASSES, x.shape[0]))
    return state, normal(x), normal(described.output)


def training_step(
    library: type[LaxOps], network: Network, state: State, x: jax.Array, target: jax.Array
) -> tuple[State, jax.Array]:
    """The next state and the loss: the mean cross entropy or the mean squared error, in float32."""

    def loss_of(params: list[Any]) -> tuple[jax.Array, Any]:
        ops = library(params)
        y = network.run(ops, x).astype(jnp.float32)
        if network.classifies:
            loss = -jnp.take_along_axis(jax.nn.log_softmax(y), target[:, None], 1).mean()
        else:
            loss = jnp.square(y - target).mean()
        return loss, ops.statistics

    (loss, batch), gradients = jax.value_and_grad(loss_of, has_aux=True)(state.params)
    velocity = jax.tree.map(lambda v, g: MOMENTUM * v + g, state.velocity, gradients)
    params = jax.tree.map(lambda p, v: p - LEARNING_RATE * v, state.params, velocity)
    kept = STATISTICS_MOMENTUM
    statistics = jax.tree.map(lambda old, new: kept * old + (1 - kept) * new, state.statistics, batch)
    return State(params, velocity, statistics), loss
