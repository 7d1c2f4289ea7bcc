"""Copies of layers, by `copy.deepcopy`, pickle and cloudpickle, as target networks and worker processes make them."""

from __future__ import annotations

import copy
import functools
import pickle

import equinox as eqx
import flax.linen
import flax.nnx
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxgrad import nn
from jaxgrad._src.convert.functions import computes
from jaxgrad.convert import flax as convert_flax
from jaxgrad.convert import keras as convert_keras
from jaxgrad.nn import equinox, haiku, keras, linen, nnx

pytestmark = pytest.mark.jax_version

T, B, I, H = 4, 3, 2, 5  # noqa: E741
KEY = jax.random.key(0)
X = jax.random.normal(KEY, (B, T, I), jnp.float32)


def _of_linen(module):
    variables = module.init(KEY, X)
    return module, lambda module: module.apply(variables, X)


def _of_haiku(function):
    module = hk.transform_with_state(function)
    params, state = module.init(KEY, X)
    return (params, state), lambda variables: module.apply(*variables, None, X)[0]


def _unroll(x):
    core = hk.GRU(H)
    return haiku.dynamic_unroll(core, x, core.initial_state(B), time_major=False)[0]


def _norm_of_equinox():
    norm = eqx.nn.make_with_state(equinox.BatchNorm)(T, axis_name="batch", mode="batch")
    return norm, lambda norm: jax.vmap(norm[0], (0, None), (0, None), axis_name="batch")(X, norm[1])[0]


def _linen_cell(**functions):
    return flax.linen.GRUCell(H, **functions)


def _nnx_cell(**functions):
    return flax.nnx.GRUCell(I, H, rngs=flax.nnx.Rngs(0), **functions)


def _of_keras(**functions):
    layer = keras.GRU(H, return_sequences=True, **functions)
    layer.build(X.shape)
    return layer, lambda layer: layer(X)


# A layer, and a function of it that runs it.
LAYERS = {
    "linen.RNN": lambda: _of_linen(linen.RNN(_linen_cell())),
    "linen.RNN, other names": lambda: _of_linen(
        linen.RNN(_linen_cell(gate_fn=jax.lax.logistic, activation_fn=flax.linen.activation.tanh))
    ),
    "linen.BatchNorm": lambda: _of_linen(linen.BatchNorm(use_running_average=True)),
    "nnx.RNN": lambda: (nnx.RNN(_nnx_cell()), lambda rnn: rnn(X)),
    "nnx.BatchNorm": lambda: (nnx.BatchNorm(I, rngs=flax.nnx.Rngs(0)), lambda norm: norm(X)),
    "equinox.GRUCell": lambda: (
        eqx.nn.GRUCell(I, H, key=KEY),
        lambda cell: equinox.scan_gru(cell, jnp.zeros((T, H), jnp.float32), X)[1],
    ),
    "equinox.BatchNorm": _norm_of_equinox,
    "haiku.dynamic_unroll": lambda: _of_haiku(_unroll),
    "haiku.BatchNorm": lambda: _of_haiku(lambda x: haiku.BatchNorm(True, True, 0.9)(x, is_training=True)),
    "keras.GRU": _of_keras,
    "linen.GroupNorm": lambda: _of_linen(linen.GroupNorm(1)),
    "nnx.InstanceNorm": lambda: (nnx.InstanceNorm(I, rngs=flax.nnx.Rngs(0)), lambda norm: norm(X)),
    "equinox.LayerNorm": lambda: (equinox.LayerNorm((T, I)), lambda norm: jax.vmap(norm)(X)),
    "nn.LayerNorm": lambda: (nn.LayerNorm(I), lambda norm: norm(X)),
    "nn.GRU": lambda: (nn.GRU(I, H, 2, batch_first=True, key=KEY), lambda gru: gru(X)[0]),
}


def _cloudpickled(value):
    cloudpickle = pytest.importorskip("cloudpickle")
    return pickle.loads(cloudpickle.dumps(value))


COPIES = {"deepcopy": copy.deepcopy, "cloudpickle": _cloudpickled}


@pytest.mark.parametrize("way", COPIES)
@pytest.mark.parametrize("name", LAYERS)
def test_layers(name, way):
    layer, run = LAYERS[name]()
    expected = run(layer)
    np.testing.assert_array_equal(run(COPIES[way](layer)), expected)
    np.testing.assert_array_equal(run(COPIES[way](COPIES[way](layer))), expected)


@pytest.mark.parametrize(
    "name", ["equinox.GRUCell", "equinox.BatchNorm", "haiku.dynamic_unroll", "nn.GRU", "linen.BatchNorm"]
)
def test_pickle(name):
    """Python's own pickle takes no jitted function, and so no layer that refers to one, as the RNN of flax do."""
    layer, run = LAYERS[name]()
    np.testing.assert_array_equal(run(pickle.loads(pickle.dumps(layer))), run(layer))


def test_converters_of_copies():
    for read, layer in ((convert_flax.read_gru, _nnx_cell()), (convert_keras.read_gru, _of_keras()[0])):
        (found,), (expected,) = read(copy.deepcopy(layer)), read(layer)
        jax.tree.map(np.testing.assert_array_equal, found, expected)


@functools.wraps(jax.nn.sigmoid)
def _named_sigmoid(x):
    return 1.01 * jax.nn.sigmoid(x)


def _rounded(x):
    return jax.nn.sigmoid(x.astype(jnp.bfloat16)).astype(x.dtype)


def _fails(x):
    raise RuntimeError("no value")


WRONG = {
    "other name": jax.nn.hard_sigmoid,
    "name of the expected function": _named_sigmoid,
    "jitted, with this name": jax.jit(_named_sigmoid),
    "copy of a wrong function": copy.deepcopy(jax.jit(_named_sigmoid)),
    "tanh": jnp.tanh,
    "rounded": _rounded,
    "reversed": lambda x: jax.nn.sigmoid(x[::-1]),
    "identity": lambda x: x,
    "failing": _fails,
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_functions(name):
    with pytest.raises(ValueError, match="cell must have gate_fn=sigmoid, got"):
        nnx.RNN(_nnx_cell(gate_fn=WRONG[name]))(X)
    with pytest.raises(ValueError, match="cell must have gate_fn=sigmoid, got"):
        linen.RNN(_linen_cell(gate_fn=WRONG[name])).init(KEY, X)
    layer, _ = _of_keras(recurrent_activation=WRONG[name])
    assert layer._unsupported(None, False).startswith("recurrent_activation=")
    with pytest.raises(ValueError, match="a layer must have recurrent_activation='sigmoid', got"):
        convert_keras.read_gru(layer)


class _Sigmoid:
    """A function that has neither a hash nor weak references."""

    __slots__ = ("calls",)
    __hash__ = None

    def __init__(self):
        self.calls = 0

    def __call__(self, x):
        self.calls += 1
        return jax.nn.sigmoid(x)


def test_functions_are_traced_once():
    inner = _Sigmoid()
    for _ in range(2):
        assert computes(inner, "sigmoid")
    assert inner.calls == 4  # in two dtypes each

    def outer(x):
        return inner(x)

    assert computes(outer, "sigmoid")
    assert not computes(outer, "tanh")
    assert inner.calls == 6


@pytest.mark.parametrize("function", [jax.jit(jax.nn.sigmoid), lambda x: jax.nn.sigmoid(x), jax.scipy.special.expit])
def test_right_functions(function):
    np.testing.assert_array_equal(nnx.RNN(_nnx_cell(gate_fn=function))(X), nnx.RNN(_nnx_cell())(X))
    assert _of_keras(recurrent_activation=function)[0]._unsupported(None, False) is None
