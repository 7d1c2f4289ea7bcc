"""`jaxgrad.nn.keras.GRU` against `keras.layers.GRU`, whose weights it takes."""

from __future__ import annotations

import logging
import sys

import numpy as np
import pytest
from converted_gru import B, H, I, T, assert_same_bits, assert_trees_close, normal
from rnn_cases import program_of, values_and_gradients

keras = pytest.importorskip("keras")

from jaxgrad.nn.keras import GRU  # noqa: E402

X, STATE = normal(B, T, I, dtype=np.float32), normal(B, H, dtype=np.float32)
LENGTHS = np.array([T, 4, 0])[:, None]
MASKS = {"padded": np.arange(T) < LENGTHS, "any": np.random.default_rng(2).random((B, T)) < 0.5}


def _with_weights(layer):
    layer.build(X.shape)
    layer.set_weights([normal(*a.shape, seed=seed) for seed, a in enumerate(layer.get_weights())])
    return layer


def _function_of(layer, **call):
    """The outputs for weights, inputs and perhaps an initial state."""
    rest = [variable.value for variable in layer.non_trainable_variables]

    def run(weights, x, *state):
        states = {"initial_state": list(state)} if state else {}
        return layer.stateless_call(weights, rest, x, **states, **call)[0]

    return run


def _compare(ours, theirs, *args, tolerance=1e-5, **call):
    """Outputs and gradients."""
    _with_weights(theirs), _with_weights(ours)
    weights = [variable.value for variable in theirs.trainable_variables]
    assert_same_bits([variable.value for variable in ours.trainable_variables], weights)
    runs = [_function_of(layer, **call) for layer in (ours, theirs)]
    found, expected = (values_and_gradients(run, weights, *args) for run in runs)
    assert_trees_close(found, expected, tolerance)
    assert ["jaxgrad" in program_of(run, weights, *args) for run in runs] == [True, False]


def _pair(**options):
    """With `use_cudnn=False`, Keras scans over its cell. Its other path takes no 16-bit policy, and no `use_bias=False`
    where JAX has 64-bit types."""
    options = {"use_cudnn": False, **options}
    return GRU(H, **options), keras.layers.GRU(H, **options)


@pytest.mark.parametrize(
    ("mask", "options"),
    [
        (None, {"return_sequences": True, "use_cudnn": "auto"}),
        (None, {"go_backwards": True, "reset_after": False, "return_state": True}),
        ("any", {"go_backwards": True, "return_sequences": True, "use_bias": False, "return_state": True}),
        ("any", {"go_backwards": True, "zero_output_for_mask": True}),
        ("any", {"reset_after": False, "return_sequences": True, "zero_output_for_mask": True}),
        ("padded", {"return_state": True}),
    ],
    ids=str,
)
def test_values_and_gradients(options, mask):
    _compare(*_pair(**options), X, STATE, mask=MASKS.get(mask))


@pytest.mark.parametrize("size", [1, 1e3])
def test_masked_steps_keep_every_bit(size):
    """The inputs of masked steps are not used, and the state stays as it is, however large."""
    layer = _with_weights(GRU(H, return_sequences=True))
    mask = MASKS["any"]
    state = np.float32(size) * STATE
    y = np.asarray(layer(np.where(mask[:, :, None], X, np.nan), initial_state=state, mask=mask))
    before = np.concatenate([state[:, None], y[:, :-1]], axis=1)
    assert_same_bits(y[~mask], before[~mask])
    assert (y != before)[mask].any(axis=-1).all()


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
def test_mixed_precision(policy):
    """The results of float32, up to the rounding of inputs and weights. Keras rounds each step."""
    epsilon = {"mixed_bfloat16": 2.0**-7, "mixed_float16": 2.0**-10}[policy]
    pair = _pair(dtype=policy, return_sequences=True)
    _compare(*pair, X, tolerance=8 * epsilon, mask=MASKS["any"])
    exact = _with_weights(keras.layers.GRU(H, return_sequences=True))(X, mask=MASKS["any"])
    found, rounded = (layer(X, mask=MASKS["any"]) for layer in pair)
    assert found.dtype == rounded.dtype == policy.removeprefix("mixed_")
    errors = [np.abs(y.astype("float32") - exact).max() for y in (found, rounded)]
    assert errors[0] <= min(errors[1], epsilon)


def test_dropout():
    """Both draw the same mask of the inputs, one for all steps."""
    _compare(*_pair(dropout=0.5, seed=1), X, training=True)
    _compare(*_pair(dropout=0.5, recurrent_dropout=0.5, seed=1), X, training=False)


def test_bidirectional():
    pair = (keras.layers.Bidirectional(layer) for layer in _pair(return_sequences=True))
    _compare(*pair, X, mask=MASKS["padded"])


def test_stateful():
    ours, theirs = map(_with_weights, _pair(stateful=True))
    for _ in range(2):
        assert_trees_close(ours(X), theirs(X), 1e-5)
    assert_trees_close(ours.states[0].value, theirs.states[0].value, 1e-5)
    first = ours(X)
    ours.states[0].assign(np.zeros((B, H)))
    assert np.abs(first - ours(X)).max() > 1e-3


@pytest.mark.parametrize(
    ("options", "call", "reason"),
    [
        ({"activation": "relu"}, {}, "activation=relu"),
        ({"recurrent_activation": "hard_sigmoid"}, {}, "recurrent_activation=hard_sigmoid"),
        ({"unroll": True}, {}, "unroll=True"),
        ({"recurrent_dropout": 0.5, "seed": 1}, {"training": True}, "recurrent_dropout=0.5 in training"),
        (
            {"dropout": 0.5, "implementation": 1, "seed": 1},
            {"training": True},
            "dropout=0.5 with implementation=1 in training",
        ),
        ({}, {"mask": MASKS["any"][:, :, None]}, "a mask of shape (3, 6, 1)"),
    ],
    ids=["activation", "recurrent_activation", "unroll", "recurrent_dropout", "dropout", "mask"],
)
def test_calls_on_the_implementation_of_keras(options, call, reason, caplog):
    caplog.set_level(logging.INFO, logger="jaxgrad")
    ours, theirs = map(_with_weights, _pair(**options))
    for _ in range(2):
        assert_same_bits(ours(X, **call), theirs(X, **call))
    message = f"jaxgrad.nn.keras.GRU {ours.name!r} runs Keras' own implementation: {reason}"
    assert [record.getMessage() for record in caplog.records if record.name == "jaxgrad"] == [message]


def test_training_and_files(tmp_path):
    """A file of either layer is a model of the other, and both train alike."""

    def model_of(layer):
        embedding = keras.layers.Embedding(9, I, mask_zero=True)
        layers = [embedding, keras.layers.Bidirectional(layer(H, dropout=0.2, seed=1)), keras.layers.Dense(2)]
        model = keras.Sequential([keras.Input((T,), dtype="int32"), *layers])
        model.compile(optimizer=keras.optimizers.SGD(0.5), loss="mse")
        return model

    def inner(model):
        return [type(model.layers[1].forward_layer), type(model.layers[1].backward_layer)]

    tokens, labels = np.where(MASKS["any"], np.arange(T) + 1, 0), normal(B, 2, dtype=np.float32)
    ours, theirs = model_of(GRU), model_of(keras.layers.GRU)
    assert inner(ours) == [GRU, GRU]
    theirs.save(tmp_path / "theirs.keras")
    ours.load_weights(tmp_path / "theirs.keras")
    for _ in range(2):
        losses = [model.train_on_batch(tokens, labels) for model in (ours, theirs)]
        np.testing.assert_allclose(*losses, rtol=1e-5)
    assert_trees_close(ours.get_weights(), theirs.get_weights(), 1e-5)
    ours.save(tmp_path / "ours.keras")
    again = keras.models.load_model(tmp_path / "ours.keras")
    assert inner(again) == [GRU, GRU]
    theirs.load_weights(tmp_path / "ours.keras")
    for model in (again, theirs):
        assert_same_bits(model.get_weights(), ours.get_weights())


def test_configuration():
    ours, theirs = _pair(dropout=0.1, kernel_regularizer="l2", name="encoder")
    assert ours.get_config() == theirs.get_config()
    assert GRU.from_config(theirs.get_config()).get_config() == theirs.get_config()
    assert GRU(H).name.startswith("gru")


def test_other_backends(monkeypatch):
    monkeypatch.setattr(keras.backend, "backend", lambda: "torch")
    monkeypatch.delitem(sys.modules, "jaxgrad._src.nn.keras_gru")
    with pytest.raises(ImportError, match=r"Keras on its JAX backend, got 'torch'; set the .* KERAS_BACKEND=jax"):
        import jaxgrad._src.nn.keras_gru  # noqa: F401
