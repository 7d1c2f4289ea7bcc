"""A program of a user, which type checkers accept in their strict modes. `tests/project/test_consumer.py` runs it."""

from __future__ import annotations

from typing import assert_type

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

import jaxgrad
import jaxgrad.convert.equinox
import jaxgrad.convert.torch
import jaxgrad.nn.equinox
from jaxgrad import config, nn
from jaxgrad.convert import BatchNormWeights, ConvWeights, GRUWeights

X, W = jnp.ones((2, 3, 8, 8)), np.ones((4, 3, 3, 3), np.float32)


@jaxgrad.accelerate
def loss(w: jax.Array, x: jax.Array, *, scale: float = 1.0) -> jax.Array:
    return jnp.sum(scale * jax.lax.conv(x, w, (1, 1), "SAME") ** 2)


@jaxgrad.accelerate(implementation="xla")
def halve(x: jax.Array) -> jax.Array:
    return x / 2


def accelerated() -> None:
    assert_type(loss(jnp.asarray(W), X, scale=2.0), jax.Array)
    assert_type(halve(X), jax.Array)
    with jaxgrad.accelerate():
        loss(jnp.asarray(W), X)
    found = jaxgrad.report(loss, jnp.asarray(W), X, platform="cpu")
    assert_type(found, jaxgrad.Report)
    for convolution in found.convolutions:
        assert_type(convolution, jaxgrad.Convolution)
        assert_type(convolution.implementation, str)
    for layer in found.layers:
        assert_type(layer, jaxgrad.Layer)
        assert_type(layer.calls, tuple[jaxgrad.Call, ...])
    assert_type(found.counts, dict[str, int])
    assert_type(found.share, float | None)
    assert_type(found.summary + found.details(), str)


def ops() -> None:
    y = jaxgrad.conv_general_dilated(X, W, (1, 1), "SAME", bias=np.zeros(4, np.float32), activation=jax.nn.relu)
    assert_type(y, jax.Array)
    assert_type(
        jaxgrad.conv_transpose(X, jnp.ones((3, 4, 2, 2)), (2, 2), "VALID", dimension_numbers=("NCHW", "IOHW", "NCHW")),
        jax.Array,
    )
    ones = jnp.ones(8)
    normalized, mean, var = jaxgrad.batch_norm_training(X, ones, ones, activation="relu")
    assert_type(mean, jax.Array)
    assert_type(jaxgrad.batch_norm_inference(normalized, ones, ones, mean, var), jax.Array)
    rows = jaxgrad.rms_norm(jaxgrad.layer_norm(X, ones, None, activation="gelu"), ones, axis=(-1,))
    assert_type(rows, jax.Array)
    assert_type(jaxgrad.group_norm(X, None, None, num_groups=1, feature_axis=1, residual=X), jax.Array)
    states, last = jaxgrad.gru(jnp.ones((5, 2, 3)), jnp.ones((1, 12, 3)), jnp.ones((1, 12, 4)), sequence_lens=[5, 3])
    assert_type(states, jax.Array)
    assert_type(last, jax.Array)
    pooled = jaxgrad.avg_pool(jaxgrad.max_pool(X, (2, 2), (2, 2), feature_axis=1), (2, 2), feature_axis=1)
    assert_type(pooled, jax.Array)
    assert_type(jaxgrad.resize(X, (2, 3, 16, 16), "nearest"), jax.Array)


def tools() -> None:
    explained = jaxgrad.explain(jaxgrad.conv_general_dilated, X, W, (1, 1), "SAME", platform="cpu")
    assert_type(explained, jaxgrad.Explanation)
    assert_type(explained.passes, tuple[jaxgrad.PassExplanation, ...])
    assert_type(jaxgrad.plan_cache_info(), dict[str, dict[str, int]])
    with jaxgrad.forward_mode():
        jax.jvp(lambda w: jaxgrad.conv_general_dilated(X, w, (1, 1), "SAME"), (jnp.asarray(W),), (jnp.asarray(W),))
    value, tangent = jaxgrad.jvp(lambda x: jaxgrad.conv_general_dilated(x, W, (1, 1), "SAME"), (X,), (X,))
    del value, tangent
    tuning = jaxgrad.tune(loss, jnp.asarray(W), X, progress=False)
    assert_type(tuning | tuning, jaxgrad.Tuning)
    with tuning:
        loss(jnp.asarray(W), X)
    exported = jax.export.export(jax.jit(loss), disabled_checks=jaxgrad.export_disabled_checks())
    exported(jnp.asarray(W), X)
    assert_type(jaxgrad.__version__, str)


def settings() -> None:
    config.update(search="heuristic", workspace_limit=1 << 28)
    with jaxgrad.config.override(deterministic=True) as inside:
        assert_type(inside, config.Settings)
    assert_type(config.current().search, str | None)
    config.update(search=None, workspace_limit=None)


def layers() -> None:
    key = jax.random.key(0)
    gru = nn.GRU(3, 4, num_layers=2, dropout=0.1, key=key)
    output, h_n = gru(jnp.ones((5, 2, 3)), key=key)
    assert_type(output, jax.Array)
    assert_type(h_n, jax.Array)
    for each in (nn.GroupNorm(2, 4), nn.InstanceNorm(4), nn.LayerNorm((4, 5)), nn.RMSNorm(5)):
        assert_type(each(jnp.ones((2, 4, 5)), activation="silu"), jax.Array)
    assert_type(nn.RMSNorm.from_weights(nn.RMSNorm(5).weights), nn.RMSNorm)
    cell = eqx.nn.GRUCell(3, 4, key=key)
    last, _ = jaxgrad.nn.equinox.scan_gru(cell, jnp.zeros(4), jnp.ones((5, 3)))
    assert_type(last, jax.Array)
    (weights,) = jaxgrad.convert.equinox.read_gru(cell)
    assert_type(weights, GRUWeights)
    state_dict = jaxgrad.convert.torch.write_gru(weights)
    assert_type(state_dict, dict[str, jax.Array])
    conv = jaxgrad.convert.torch.read_conv({"weight": W}, padding=1)
    assert_type(conv, ConvWeights)
    assert_type(conv(X), jax.Array)
    ones = jnp.ones(8)
    norm = BatchNormWeights(ones, ones, ones, ones, epsilon=1e-5)
    normalized, norm = norm.train(X, activation="relu")
    assert_type(normalized, jax.Array)
    assert_type(norm, BatchNormWeights)


def main() -> None:
    for part in (accelerated, ops, tools, settings, layers):
        part()


if __name__ == "__main__":
    main()
