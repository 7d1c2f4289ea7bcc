"""`GRUWeights`, and weights that go from one format to another."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest
from converted_gru import STRUCTURES, B, H, I, T, assert_same_bits, normal

import jaxgrad.convert.equinox
import jaxgrad.convert.flax
import jaxgrad.convert.haiku
import jaxgrad.convert.keras
import jaxgrad.convert.torch
from jaxgrad.convert import GRUWeights

X = normal(T, B, I)
FORMATS = {
    "torch": (lambda w: jaxgrad.convert.torch.write_gru(w), jaxgrad.convert.torch.read_gru),
    "linen": (lambda w: jaxgrad.convert.flax.write_gru(w)[0], jaxgrad.convert.flax.read_gru),
    "nnx": (lambda w: jaxgrad.convert.flax.write_gru(w, api="nnx")[0], jaxgrad.convert.flax.read_gru),
    "equinox": (lambda w: jaxgrad.convert.equinox.write_gru(w)[0], jaxgrad.convert.equinox.read_gru),
    "haiku": (lambda w: jaxgrad.convert.haiku.write_gru(w)[0], jaxgrad.convert.haiku.read_gru),
    "keras": (
        lambda w: jaxgrad.convert.keras.write_gru(w)[0],
        lambda arrays: jaxgrad.convert.keras.read_gru(arrays, reset_after=None if len(arrays) in (3, 6) else True),
    ),
}


def _weights(structure, D=2, linear_before_reset=True):
    biases = [
        None if size is None else normal(D, size, seed=size + number)
        for number, size in enumerate(STRUCTURES[structure])
    ]
    arrays = jax.tree.map(jax.numpy.asarray, (normal(D, 3 * H, I), normal(D, 3 * H, H), *biases))
    return GRUWeights(*arrays, linear_before_reset=linear_before_reset)


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("name", FORMATS)
def test_between_formats(name, structure):
    """Every format holds weights with other biases than its own, and computes the same."""
    weights = _weights(structure, linear_before_reset=name != "haiku")
    write, read = FORMATS[name]
    if name == "nnx" and structure in ("two biases", "one bias and that of n"):
        with pytest.raises(ValueError, match="zeros as the recurrent bias"):
            write(weights)
        return
    (found,) = read(write(weights))
    np.testing.assert_allclose(found(X)[0], weights(X)[0], rtol=0, atol=1e-12)
    again = read(write(found))[0]
    assert_same_bits(again, found)


def test_bits_of_zeros():
    """A bias of -0.0 is not lost where two biases are added."""
    weights = _weights("one bias and that of n")
    weights = dataclasses.replace(weights, wb=-jax.numpy.zeros_like(weights.wb))
    write, read = FORMATS["equinox"]
    assert_same_bits(read(write(weights))[0].wb, weights.wb)


@pytest.mark.parametrize("name", ["torch", "linen", "equinox", "keras"])
def test_what_a_format_cannot_hold(name):
    write, _ = FORMATS[name]
    weights = _weights("two biases", 1)
    with pytest.raises(ValueError, match=r"weights must have clip=None, .* got 0.5"):
        write(dataclasses.replace(weights, clip=0.5))
    with pytest.raises(TypeError, match="weights must be GRUWeights or a sequence of them, got int"):
        write([1])
    if name != "keras":
        with pytest.raises(ValueError, match=r"must have linear_before_reset=True, .* got False"):
            write(dataclasses.replace(weights, linear_before_reset=False))
        with pytest.raises(ValueError, match="weights must have reverse=False"):
            write(dataclasses.replace(weights, reverse=True))


def test_two_directions_in_reverse():
    weights = dataclasses.replace(_weights("two biases", 2), reverse=True)
    for call in (lambda: weights(X), lambda: FORMATS["keras"][0](weights)):
        with pytest.raises(ValueError, match="reverse must be False for two directions"):
            call()


@pytest.mark.parametrize("structure", STRUCTURES)
def test_training_keeps_the_biases(structure):
    """The gradient has the biases of the record, so that a format that it was read from can hold the trained record."""
    weights = _weights(structure)
    gradient = jax.jit(jax.grad(lambda weights: (weights(X)[0] ** 2).sum()))(weights)
    assert jax.tree.structure(gradient) == jax.tree.structure(weights)
    assert all(np.abs(leaf).max() > 0.01 for leaf in jax.tree.leaves(gradient))


def test_missing_package(run_python):
    script = """
import sys, importlib
import jaxgrad, jaxgrad.convert, jaxgrad.nn
assert not {"flax", "equinox", "haiku", "onnx", "keras", "torch"} & set(sys.modules)
for package in "flax", "equinox", "haiku", "onnx":
    module = f"jaxgrad.{'convert' if package == 'onnx' else 'nn'}.{'linen' if package == 'flax' else package}"
    sys.modules[package] = None
    try:
        importlib.import_module(module)
    except ImportError as error:
        assert f"{module} requires {package}: pip install 'jaxgrad[{package}]'" in str(error), error
    else:
        raise AssertionError(module)
"""
    run_python(script)
