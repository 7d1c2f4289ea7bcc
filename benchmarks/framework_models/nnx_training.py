"""A training step of a classifier of flax.nnx, in the functional form of flax's documentation."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from benchmarks.framework_models import Training, sgd


def classifier_training(model: nnx.Module) -> Training:
    graph, state = nnx.split((model, nnx.Optimizer(model, sgd(), wrt=nnx.Param)))

    def step(state: Any, x: jax.Array, labels: jax.Array) -> tuple[Any, jax.Array]:
        model, optimizer = nnx.merge(graph, state)

        def loss_fn(model: nnx.Module) -> jax.Array:
            logits = model(x).astype(jnp.float32)
            return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

        loss, gradients = nnx.value_and_grad(loss_fn)(model)
        optimizer.update(model, gradients)
        return nnx.state((model, optimizer)), loss

    return Training(state, step)
