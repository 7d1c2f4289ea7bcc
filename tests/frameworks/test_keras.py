"""Training, evaluation and prediction of a Keras model under `jaxgrad.accelerate`, against the same model without."""

from __future__ import annotations

import logging

import numpy as np
import pytest

import jaxgrad

pytestmark = pytest.mark.jax_version

keras = pytest.importorskip("keras")

_IMAGES = np.random.default_rng(0).normal(size=(6, 10, 8, 8)).astype(np.float32)
_LABELS = np.arange(6) % 3


def _model():
    keras.utils.set_random_seed(0)
    layers = [
        keras.layers.Conv2D(16, 3, strides=2, padding="same"),
        keras.layers.BatchNormalization(),
        keras.layers.Conv2DTranspose(8, (3, 2), strides=2, padding="same"),
        keras.layers.GlobalAveragePooling2D(),
        keras.layers.Dense(3, activation="softmax"),
    ]
    model = keras.Sequential([keras.Input(_IMAGES.shape[1:]), *layers])
    model.compile(optimizer=keras.optimizers.SGD(0.1), loss="sparse_categorical_crossentropy")
    return model


def _passes(caplog):
    """The passes that jaxgrad was asked to select since the last call."""
    messages = [record.getMessage() for record in caplog.records if record.name == "jaxgrad"]
    caplog.clear()
    found = (message.removeprefix("conv_general_dilated, ").split(" [")[0] for message in messages)
    return {name for name in found if name in ("forward", "input_gradient", "weight_gradient")}


def test_methods_of_a_model(caplog):
    caplog.set_level(logging.DEBUG, logger="jaxgrad")
    plain, model = _model(), _model()
    settings = {"batch_size": 3, "epochs": 2, "shuffle": False, "verbose": 0}
    expected = plain.fit(_IMAGES, _LABELS, **settings).history["loss"]
    assert not _passes(caplog)
    found = jaxgrad.accelerate(model.fit)(_IMAGES, _LABELS, **settings).history["loss"]
    assert _passes(caplog) == {"forward", "input_gradient", "weight_gradient"}
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert expected[1] < expected[0]
    for weights, reference in zip(model.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_allclose(weights, reference, rtol=1e-4, atol=1e-5)

    predicted = jaxgrad.accelerate(model.predict)(_IMAGES, verbose=0)
    assert _passes(caplog)
    np.testing.assert_allclose(predicted, plain.predict(_IMAGES, verbose=0), rtol=1e-4)
    evaluated = jaxgrad.accelerate(model.evaluate)(_IMAGES, _LABELS, verbose=0)
    np.testing.assert_allclose(evaluated, plain.evaluate(_IMAGES, _LABELS, verbose=0), rtol=1e-5)


def test_report_of_a_model():
    assert jaxgrad.report(jaxgrad.accelerate(_model()), _IMAGES, platform="cpu").counts == {"onednn": 2}
