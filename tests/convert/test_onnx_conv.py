"""Nodes Conv and ConvTranspose of ONNX models, against ONNX's reference implementation."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest
from converted_gru import assert_same_bits, normal
from converted_layers import images

onnx = pytest.importorskip("onnx")
from onnx import TensorProto, helper, numpy_helper  # noqa: E402
from onnx.reference import ReferenceEvaluator  # noqa: E402

from jaxgrad.convert import onnx as convert  # noqa: E402

CASES = {
    "strides": ("Conv", (12, 8, 3, 2), (9, 7), {"strides": [2, 3], "pads": [1, 0, 2, 1]}),
    "same, groups": ("Conv", (12, 2, 4, 3), (9, 7), {"auto_pad": "SAME_UPPER", "group": 4}),
    "lower": ("Conv", (12, 8, 4), (23,), {"auto_pad": "SAME_LOWER", "strides": [2]}),
    "dilation": ("Conv", (12, 8, 3, 2), (9, 7), {"dilations": [2, 1], "auto_pad": "VALID"}),
    "output padding": (
        "ConvTranspose",
        (8, 12, 3, 4),
        (5, 4),
        {"strides": [2, 3], "pads": [1, 0, 2, 1], "output_padding": [1, 2]},
    ),
    "groups, dilation": ("ConvTranspose", (8, 3, 3, 2), (5, 4), {"strides": [2, 2], "group": 4, "dilations": [2, 1]}),
}


def _model(op_type, shape, spatial, attributes, bias=True):
    """A graph with one node, named "node"."""
    features = shape[0] if op_type == "Conv" else shape[1] * attributes.get("group", 1)
    constants = {"W": normal(*shape, dtype=np.float32)}
    if bias:
        constants["B"] = normal(features, dtype=np.float32)
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in "xy")
    node = helper.make_node(op_type, ["x", *constants], ["y"], "node", **attributes)
    initializers = [numpy_helper.from_array(array, name) for name, array in constants.items()]
    return helper.make_model(helper.make_graph([node], "g", [x], [y], initializers))


def _reference(model, x):
    """ONNX's reference implementation of ConvTranspose has no groups: each is a node of its own."""
    (node,), arrays = model.graph.node, [numpy_helper.to_array(tensor) for tensor in model.graph.initializer]
    (group,) = [a.i for a in node.attribute if a.name == "group"] or [1]
    if node.op_type == "Conv" or group == 1:
        return ReferenceEvaluator(model).run(None, {"x": x})[0]
    parts = []
    for w, b, own in zip(*(np.split(a, group) for a in arrays), np.split(x, group, 1), strict=True):
        part = onnx.ModelProto()
        part.CopyFrom(model)
        part.graph.node[0].attribute.remove(next(a for a in part.graph.node[0].attribute if a.name == "group"))
        for tensor, array in zip(part.graph.initializer, (w, b), strict=True):
            tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))
        parts.append(_reference(part, own))
    return np.concatenate(parts, 1)


@pytest.mark.parametrize("name", CASES)
def test_nodes(name):
    op_type, _, spatial, _ = CASES[name]
    transpose = op_type == "ConvTranspose"
    model = _model(*CASES[name], bias=name != "strides")
    read, write = (getattr(convert, f"{verb}_conv{'_transpose' * transpose}") for verb in ("read", "write"))
    (record,) = read(model, "node")
    x = images(*spatial, channels_last=False).astype(np.float32)
    expected = _reference(model, x)
    np.testing.assert_allclose(record(x), expected, rtol=0, atol=2e-5)
    assert write(record, model) == model
    trained = jax.tree.map(lambda a: 2 * a, record)
    written = write([trained], model)
    assert_same_bits(read(written)[0], trained)
    np.testing.assert_allclose(_reference(written, x), 2 * expected, rtol=0, atol=5e-5)


def test_same_upper_transposed():
    """ONNX's reference implementation does not know auto_pad here: against the pads of the specification."""
    attributes = {"strides": [2, 3], "auto_pad": "SAME_LOWER"}
    (record,) = convert.read_conv_transpose(_model("ConvTranspose", (8, 12, 5, 4), (5, 4), attributes))
    assert record.padding == ((2, 1), (1, 0))
    assert record(images(5, 4, channels_last=False).astype(np.float32)).shape == (3, 12, 10, 12)


def test_errors():
    model = _model(*CASES["strides"])
    (record,) = convert.read_conv(model)
    with pytest.raises(ValueError, match=r"the graph has no Conv node 'other'; it has \['node'\]"):
        convert.read_conv(model, "other")
    with pytest.raises(ValueError, match="the graph has no ConvTranspose node"):
        convert.read_conv_transpose(model)
    with pytest.raises(TypeError, match=r"model must be an onnx.ModelProto, got str; of a file, onnx.load"):
        convert.read_conv("model.onnx")
    with pytest.raises(ValueError, match=r"must have strides=\(2, 3\), got \(1, 1\)"):
        convert.write_conv(dataclasses.replace(record, strides=(1, 1)), model)
    with pytest.raises(ValueError, match="for the node 'node' must be with B, got weights without B"):
        convert.write_conv(dataclasses.replace(record, bias=None), model)
    with pytest.raises(ValueError, match="weights must have a record for each of the 1 nodes, got 2"):
        convert.write_conv([record, record], model)
    wide = jax.tree.map(lambda a: a.astype(np.float64), record)
    with pytest.raises(ValueError, match=r"W of the node 'node' must be float32 \(12, 8, 3, 2\), got float64"):
        convert.write_conv(wide, model)
    attributes = {"output_shape": [10, 12], "strides": [2, 3]}
    with pytest.raises(ValueError, match=r"must have pads instead of output_shape, got output_shape = \[10, 12\]"):
        convert.read_conv_transpose(_model("ConvTranspose", (8, 12, 5, 4), (5, 4), attributes))
    model.graph.initializer.pop(0)
    with pytest.raises(ValueError, match="W of the node 'node', 'W', must be a constant of the graph"):
        convert.read_conv(model)


def test_several_nodes():
    """Each node has its own constants, or shares those of another node with the same weights."""
    names = [f"W{number}" for number in range(8)]
    nodes = [helper.make_node("Conv", ["x", name], [f"y{name}"], name) for name in (*names, "W0")]
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in ("x", "yW0")]
    tensors = [numpy_helper.from_array(normal(3, 2, 3, seed=i, dtype=np.float32), name) for i, name in enumerate(names)]
    model = helper.make_model(helper.make_graph(nodes, "g", values[:1], values[1:], tensors))
    records = jax.tree.map(lambda a: 2 * a, convert.read_conv(model))
    assert_same_bits(convert.read_conv(convert.write_conv(records, model)), records)
    with pytest.raises(ValueError, match="W of the node 'W0' is the constant 'W0' of another node"):
        convert.write_conv([*records[:-1], records[1]], model)
