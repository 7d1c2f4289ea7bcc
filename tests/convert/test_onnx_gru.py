"""GRU nodes of ONNX models, against ONNX's reference evaluator."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from converted_gru import B, H, I, T, assert_same_bits, normal

onnx = pytest.importorskip("onnx")

from onnx import helper, numpy_helper  # noqa: E402
from onnx.reference import ReferenceEvaluator  # noqa: E402

from jaxgrad.convert import onnx as convert  # noqa: E402

X = normal(T, B, I)


def _model(dtype=np.float64, bias=True, shared=False, **attributes):
    """Two GRU nodes, one after the other; R of the second is an output of a Constant node."""
    arrays = {"W1": (1, 3 * H, I), "R1": (1, 3 * H, H), "W2": (1, 3 * H, H), "R2": (1, 3 * H, H)}
    arrays |= {"B1": (1, 6 * H), "B2": (1, 6 * H)} if bias else {}
    tensors = {
        name: numpy_helper.from_array(normal(*shape, seed=ord(name[0]), dtype=dtype), name)
        for name, shape in arrays.items()
    }
    constant = tensors.pop("R2")
    biases = ["B1", "B2"] if bias else ["", ""]
    nodes = [
        helper.make_node("GRU", ["X", "W1", "R1", biases[0]], ["Y1"], name="first", hidden_size=H, **attributes),
        helper.make_node("Squeeze", ["Y1", "axis"], ["X2"]),
        helper.make_node("Constant", [], ["R2"], value=constant),
        helper.make_node("GRU", ["X2", "W2", "R1" if shared else "R2", biases[1]], ["Y"], name="second", hidden_size=H),
    ]
    tensors["axis"] = numpy_helper.from_array(np.array([1]), "axis")
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    values = [helper.make_tensor_value_info(name, kind, None) for name in ("X", "Y")]
    graph = helper.make_graph(nodes, "graph", values[:1], values[1:], list(tensors.values()))
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 22)])


def _run(model):
    return ReferenceEvaluator(model).run(None, {"X": X})[0]


def _apply(layers, x=X):
    first, second = layers
    return second(first(x)[0][:, 0])[0]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    "attributes", [{}, {"linear_before_reset": 1, "activations": ["Sigmoid", "Tanh"]}], ids=["", "after"]
)
def test_read_and_write(attributes, bias):
    model = _model(bias=bias, **attributes)
    layers = convert.read_gru(model)
    np.testing.assert_allclose(_apply(layers), _run(model), rtol=0, atol=1e-12)
    assert convert.write_gru(layers, model).SerializeToString() == model.SerializeToString()
    trained = jax.tree.map(
        lambda a, g: a - 0.1 * g, layers, jax.grad(lambda layers: (_apply(layers) ** 2).sum())(layers)
    )
    written = convert.write_gru(trained, model)
    np.testing.assert_allclose(_apply(trained), _run(written), rtol=0, atol=1e-12)
    assert_same_bits(convert.read_gru(written, "second"), trained[1:])


def test_attributes():
    """The evaluator does not know `clip`."""
    model = _model(direction="reverse", clip=0.5)
    first, second = convert.read_gru(model)
    assert (first.direction, first.clip, second.direction, second.clip) == ("reverse", 0.5, "forward", None)
    with pytest.raises(ValueError, match=r"the weights for the node 'first' must have clip=0.5, got None"):
        convert.write_gru((dataclasses.replace(first, clip=None), second), model)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, jnp.bfloat16])
def test_dtypes(dtype):
    model = _model(dtype)
    layers = convert.read_gru(model)
    assert {leaf.dtype for leaf in jax.tree.leaves(layers)} == {np.dtype(dtype)}
    assert convert.write_gru(layers, model).SerializeToString() == model.SerializeToString()


def test_errors():
    model = _model()
    layers = convert.read_gru(model)
    with pytest.raises(ValueError, match=r"no GRU node 'third'; it has \['first', 'second'\]"):
        convert.read_gru(model, "third")
    with pytest.raises(ValueError, match=r"activations Sigmoid and Tanh, got sigmoid, relu"):
        convert.read_gru(_model(activations=["Sigmoid", "Relu"]))
    with pytest.raises(ValueError, match="a record for each of the 2 nodes, got 1"):
        convert.write_gru(layers[0], model)
    with pytest.raises(
        ValueError, match=r"W of the node 'first' must be float64 \(1, 12, 5\), got float64 \(1, 12, 4\)"
    ):
        convert.write_gru((layers[1], layers[1]), model)
    with pytest.raises(ValueError, match="for the node 'first' must be without B, got weights with B"):
        convert.write_gru(layers, _model(bias=False))
    with pytest.raises(ValueError, match="R of the node 'second' is the constant 'R1' of another node"):
        convert.write_gru((layers[0], jax.tree.map(lambda a: a + 1, layers[1])), _model(shared=True))
    with pytest.raises(ValueError, match="activations Sigmoid and Tanh"):
        convert.write_gru(layers, _model(activations=["Sigmoid", "Relu"]))
    graph_input = _model()
    del graph_input.graph.initializer[0]
    with pytest.raises(ValueError, match="W of the node 'first', 'W1', must be a constant of the graph"):
        convert.read_gru(graph_input)
