"""Recurrent networks and their losses, for any GRU layer: jaxgrad's, and two on lax.scan."""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import jaxgrad
from jaxgrad._src.bench.gru import scan_gru

LEARNING_RATE, MOMENTUM = 0.01, 0.9
_OBSERVED, _ACTIONS = 64, 6  # of "ppo": features of an observation, and actions
_CLIP, _VALUE_WEIGHT, _ENTROPY_WEIGHT = 0.2, 0.5, 0.01
SYMBOLS = 128  # of "char-lm"

# layer(x [T, B, I], gru, initial_h [B, H], reset [T, B] or None) -> y [T, B, H]
Layer = Callable[[jax.Array, "Gru", jax.Array, "jax.Array | None"], jax.Array]


class Gru(NamedTuple):
    w: jax.Array  # [3H, I], gates z, r, h
    r: jax.Array  # [3H, H]
    b: jax.Array  # [6H]


class Dense(NamedTuple):
    w: jax.Array  # [inputs, outputs]
    b: jax.Array  # [outputs]

    def __call__(self, x: jax.Array) -> jax.Array:
        return x @ self.w + self.b


class State(NamedTuple):
    """The state that a training step takes and returns. The velocity after the first step equals the gradients."""

    params: dict[str, Any]
    velocity: dict[str, Any]


def _with_one_direction(function: Any) -> Layer:
    def layer(x: jax.Array, gru: Gru, initial_h: jax.Array, reset: jax.Array | None) -> jax.Array:
        arrays = (gru.w[None], gru.r[None], gru.b[None], None, initial_h[None])
        return function(x, *arrays, reset)[0][:, 0]

    return layer


def _jaxgrad(x: jax.Array, w: Any, r: Any, b: Any, lens: Any, h: Any, reset: Any) -> Any:
    return jaxgrad.gru(x, w, r, b, lens, h, linear_before_reset=True, reset=reset)


def _scan(x: jax.Array, w: Any, r: Any, b: Any, lens: Any, h: Any, reset: Any) -> Any:
    return scan_gru(x, w, r, b, h, lens, reset, bidirectional=False, linear_before_reset=True)


def _scan_of_cell(x: jax.Array, gru: Gru, initial_h: jax.Array, reset: jax.Array | None) -> jax.Array:
    """As a scanned GRUCell of flax, whose state is replaced where an episode starts."""
    input_bias, recurrent_bias = jnp.split(gru.b, 2)

    def cell(h: jax.Array, inputs: tuple[jax.Array, jax.Array | None]) -> tuple[jax.Array, jax.Array]:
        x_t, reset_t = inputs
        h = h if reset_t is None else jnp.where(reset_t[:, None], 0, h)
        in_z, in_r, in_n = jnp.split(x_t @ gru.w.T + input_bias, 3, axis=-1)
        re_z, re_r, re_n = jnp.split(h @ gru.r.T + recurrent_bias, 3, axis=-1)
        z, r = jax.nn.sigmoid(in_z + re_z), jax.nn.sigmoid(in_r + re_r)
        h = (1 - z) * jnp.tanh(in_n + r * re_n) + z * h
        return h, h

    return lax.scan(cell, initial_h, (x, reset))[1]


LAYERS: dict[str, Layer] = {
    "jaxgrad": _with_one_direction(_jaxgrad),
    "scan": _with_one_direction(_scan),
    "cell": _scan_of_cell,
}


class Model(abc.ABC):
    @abc.abstractmethod
    def params(self, H: int, normal: Callable[..., jax.Array]) -> dict[str, Any]:
        """`normal(*shape, scale=s)` draws an array."""

    @abc.abstractmethod
    def batch(self, T: int, B: int, H: int, normal: Callable[..., jax.Array]) -> tuple[jax.Array, ...]: ...

    @abc.abstractmethod
    def loss(self, layer: Layer, params: dict[str, Any], *batch: jax.Array) -> jax.Array: ...

    @abc.abstractmethod
    def flops(self, T: int, B: int, H: int) -> int:
        """Of the matrix products of a training step: forward and two gradients, but none of the network's input."""


class _Ppo(Model):
    """One update of recurrent PPO: an actor and a critic on a GRU, the clipped losses of both, and the entropy."""

    def params(self, H: int, normal: Callable[..., jax.Array]) -> dict[str, Any]:
        widths = {"embed": (_OBSERVED, H), "actor": (H, H), "logits": (H, _ACTIONS), "critic": (H, H), "value": (H, 1)}
        dense = {
            name: Dense(normal(*shape, scale=shape[0] ** -0.5), normal(shape[1], scale=0.1))
            for name, shape in widths.items()
        }
        return {"gru": _gru(H, H, normal), **dense}

    def batch(self, T: int, B: int, H: int, normal: Callable[..., jax.Array]) -> tuple[jax.Array, ...]:
        rng = np.random.default_rng(2)
        actions = jnp.asarray(rng.integers(0, _ACTIONS, (T, B)))
        starts = jnp.asarray(rng.random((T, B)) < 0.01)
        old_log_probs = normal(T, B, scale=0.1) - np.log(_ACTIONS)
        advantages, old_values, targets = (normal(T, B) for _ in range(3))
        return (
            normal(T, B, _OBSERVED),
            starts,
            normal(B, H, scale=0.5),
            actions,
            old_log_probs,
            advantages,
            old_values,
            targets,
        )

    def loss(self, layer: Layer, params: dict[str, Any], *batch: jax.Array) -> jax.Array:
        observed, starts, initial_h, actions, *floats = batch
        old_log_probs, advantages, old_values, targets = (each.astype(jnp.float32) for each in floats)
        y = layer(jax.nn.relu(params["embed"](observed)), params["gru"], initial_h, starts)
        logits = params["logits"](jax.nn.relu(params["actor"](y))).astype(jnp.float32)
        values = params["value"](jax.nn.relu(params["critic"](y)))[..., 0].astype(jnp.float32)
        log_probs = jax.nn.log_softmax(logits)
        ratio = jnp.exp(jnp.take_along_axis(log_probs, actions[..., None], -1)[..., 0] - old_log_probs)
        clipped = jnp.clip(ratio, 1 - _CLIP, 1 + _CLIP)
        actor = -jnp.minimum(ratio * advantages, clipped * advantages).mean()
        near = old_values + jnp.clip(values - old_values, -_CLIP, _CLIP)
        critic = 0.5 * jnp.maximum(jnp.square(values - targets), jnp.square(near - targets)).mean()
        entropy = -(jnp.exp(log_probs) * log_probs).sum(-1).mean()
        return actor + _VALUE_WEIGHT * critic - _ENTROPY_WEIGHT * entropy

    def flops(self, T: int, B: int, H: int) -> int:
        return 2 * T * B * (2 * _OBSERVED * H + 3 * (6 * H * H + 2 * H * H + H * (_ACTIONS + 1)))


class _CharLm(Model):
    """The next symbol of each of B texts, by two GRU layers."""

    def params(self, H: int, normal: Callable[..., jax.Array]) -> dict[str, Any]:
        return {
            "embedding": normal(SYMBOLS, H),
            "gru1": _gru(H, H, normal),
            "gru2": _gru(H, H, normal),
            "logits": Dense(normal(H, SYMBOLS, scale=H**-0.5), normal(SYMBOLS, scale=0.1)),
        }

    def batch(self, T: int, B: int, H: int, normal: Callable[..., jax.Array]) -> tuple[jax.Array, ...]:
        text = np.random.default_rng(2).integers(0, SYMBOLS, (T + 1, B))
        return jnp.asarray(text), normal(2, B, H, scale=0.5)

    def loss(self, layer: Layer, params: dict[str, Any], *batch: jax.Array) -> jax.Array:
        text, initial_h = batch
        y = params["embedding"][text[:-1]]
        for name, h in zip(("gru1", "gru2"), initial_h, strict=True):
            y = layer(y, params[name], h, None)
        log_probs = jax.nn.log_softmax(params["logits"](y).astype(jnp.float32))
        return -jnp.take_along_axis(log_probs, text[1:, :, None], -1).mean()

    def flops(self, T: int, B: int, H: int) -> int:
        return 3 * 2 * T * B * (2 * 6 * H * H + H * SYMBOLS)


MODELS: dict[str, Model] = {"ppo": _Ppo(), "char-lm": _CharLm()}


def arguments(model: Model, T: int, B: int, H: int, dtype: str) -> tuple[Any, ...]:
    """The first state and one batch."""
    rng = np.random.default_rng(1)

    def normal(*shape: int, scale: float = 1) -> jax.Array:
        return jnp.asarray(scale * rng.standard_normal(shape, np.float32), dtype)

    params = model.params(H, normal)
    return State(params, jax.tree.map(jnp.zeros_like, params)), *model.batch(T, B, H, normal)


def training_step(model: Model, layer: Layer, state: State, *batch: jax.Array) -> tuple[State, jax.Array]:
    """The next state and the loss."""
    loss, gradients = jax.value_and_grad(lambda params: model.loss(layer, params, *batch))(state.params)
    velocity = jax.tree.map(lambda v, g: MOMENTUM * v + g, state.velocity, gradients)
    return State(jax.tree.map(lambda p, v: p - LEARNING_RATE * v, state.params, velocity), velocity), loss


def _gru(I: int, H: int, normal: Callable[..., jax.Array]) -> Gru:  # noqa: E741
    return Gru(normal(3 * H, I, scale=I**-0.5), normal(3 * H, H, scale=H**-0.5), normal(6 * H, scale=0.1))
