"""Malformed nodes and constants of ONNX models: each error names the node, what was expected and what was found."""

from __future__ import annotations

import re

import numpy as np
import pytest

onnx = pytest.importorskip("onnx")
from onnx import TensorProto, helper, numpy_helper  # noqa: E402

from jaxgrad.convert import onnx as convert  # noqa: E402

I, H = 2, 3  # noqa: E741
CONV = {"W": (4, 3, 3, 2), "B": (4,)}
TRANSPOSE = {"W": (3, 4, 3, 2), "B": (4,)}
GRU = {"W": (1, 3 * H, I), "R": (1, 3 * H, H), "B": (1, 6 * H)}
NORM = {"scale": (4,), "B": (4,), "mean": (4,), "var": (4,)}
READ = {
    "Conv": (convert.read_conv, CONV),
    "ConvTranspose": (convert.read_conv_transpose, TRANSPOSE),
    "GRU": (convert.read_gru, GRU),
    "BatchNormalization": (convert.read_batch_norm, NORM),
}


def _model(op_type, attributes=(), shapes=(), inputs=None):
    shapes = {**READ[op_type][1], **dict(shapes)}
    node = helper.make_node(op_type, ["x", *shapes] if inputs is None else inputs, ["y"], "own", **dict(attributes))
    tensors = [numpy_helper.from_array(np.ones(shape, np.float32), name) for name, shape in shapes.items()]
    return helper.make_model(helper.make_graph([node], "g", [], [], tensors))


def _expect(message, op_type, model):
    with pytest.raises(
        ValueError, match="^" + re.escape(f"jaxgrad.convert.onnx.{READ[op_type][0].__name__}: {message}")
    ):
        READ[op_type][0](model)


AUTO_PADS = "'NOTSET', 'SAME_UPPER', 'SAME_LOWER', 'VALID'"
ATTRIBUTES = [
    ("Conv", "auto_pad", "BOGUS", f"of {AUTO_PADS}, got 'BOGUS'"),
    ("Conv", "auto_pad", b"\xff", f"of {AUTO_PADS}, got"),
    ("Conv", "auto_pad", 3, "of the type STRING, got INT"),
    ("Conv", "kernel_shape", [9, 9], "[3, 2], as the window of W, got [9, 9]"),
    ("Conv", "pads", [1, 1], "with 4 ints of at least 0, got [1, 1]"),
    ("Conv", "pads", [-1, 0, 0, 0], "with 4 ints of at least 0, got [-1, 0, 0, 0]"),
    ("Conv", "strides", [2], "with 2 ints of at least 1, got [2]"),
    ("Conv", "strides", [1.5, 2.0], "of the type INTS, got FLOATS"),
    ("Conv", "dilations", [0, 1], "with 2 ints of at least 1, got [0, 1]"),
    ("Conv", "group", "two", "of the type INT, got STRING"),
    ("ConvTranspose", "auto_pad", "BOGUS", f"of {AUTO_PADS}, got 'BOGUS'"),
    ("ConvTranspose", "kernel_shape", [3], "[3, 2], as the window of W, got [3]"),
    ("ConvTranspose", "output_padding", [0, -1], "with 2 ints of at least 0, got [0, -1]"),
    ("GRU", "direction", "sideways", "of 'forward', 'reverse', 'bidirectional', got 'sideways'"),
    ("GRU", "activations", [1, 2], "of the type STRINGS, got INTS"),
    ("GRU", "hidden_size", 4, "3, as H of R, got 4"),
    ("GRU", "linear_before_reset", 7, "of 0 or 1, got 7"),
    ("GRU", "layout", 2, "of 0 or 1, got 2"),
    ("GRU", "clip", -1.0, "above 0, got -1.0"),
    ("GRU", "clip", float("nan"), "that is a number, got nan"),
    ("BatchNormalization", "epsilon", float("nan"), "that is a number, got nan"),
    ("BatchNormalization", "momentum", 1, "of the type FLOAT, got INT"),
]


@pytest.mark.parametrize(("op_type", "name", "value", "expected"), ATTRIBUTES)
def test_attributes(op_type, name, value, expected):
    _expect(f"the node 'own' must have {name} {expected}", op_type, _model(op_type, {name: value}))


def test_attribute_of_a_function():
    model = _model("Conv", {"group": 1})
    model.graph.node[0].attribute[0].ref_attr_name = "outer"
    _expect("the node 'own' must have group of the type INT, got a reference to 'outer'", "Conv", model)


def test_batch_norm_numbers():
    _expect(
        "the node 'own': epsilon must be a finite number of at least 0, got -1.0",
        "BatchNormalization",
        _model("BatchNormalization", {"epsilon": -1.0}),
    )


SHAPES = [
    ("Conv", {"W": ()}, "must have W of rank 3, 4 or 5, got the shape ()"),
    ("ConvTranspose", {"W": (4, 3)}, "must have W of rank 3, 4 or 5, got the shape (4, 3)"),
    (
        "GRU",
        {"R": ()},
        "must have R of the shape [D, 3H, H], with D = 1 for the direction 'forward' and H = 0 of R, got ()",
    ),
    (
        "GRU",
        {"W": (3 * H, I)},
        "must have W of the shape [D, 3H, I], with D = 1 for the direction 'forward' and H = 3 of R, got (9, 2)",
    ),
    (
        "GRU",
        {"B": (6 * H,)},
        "must have B of the shape [D, 6H], with D = 1 for the direction 'forward' and H = 3 of R, got (18,)",
    ),
    (
        "GRU",
        {"B": (1, 3 * H)},
        "must have B of the shape [D, 6H], with D = 1 for the direction 'forward' and H = 3 of R, got (1, 9)",
    ),
]


@pytest.mark.parametrize(("op_type", "shapes", "message"), SHAPES)
def test_shapes(op_type, shapes, message):
    _expect(f"the node 'own' {message}", op_type, _model(op_type, shapes=shapes))


def test_shapes_of_attributes():
    message = "the node 'own' must have R of the shape [D, 3H, H], with D = 2 for the direction 'bidirectional'"
    _expect(message, "GRU", _model("GRU", {"direction": "bidirectional"}))
    _expect("the node 'own': groups must divide the 4 output features, got 3", "Conv", _model("Conv", {"group": 3}))
    _expect("the node 'own': the bias must have the shape (4,), got (5,)", "Conv", _model("Conv", shapes={"B": (5,)}))
    message = "the node 'own': the arrays must all have one shape (C,), got"
    _expect(message, "BatchNormalization", _model("BatchNormalization", shapes={"mean": (3,)}))


@pytest.mark.parametrize("op_type", READ)
def test_missing_inputs(op_type):
    for inputs in (["x"], ["x", ""], []):
        name = {"BatchNormalization": "scale"}.get(op_type, "W")
        _expect(f"the node 'own' must have {name}, its input 1, got {inputs}", op_type, _model(op_type, inputs=inputs))


def test_other_domain():
    model = _model("Conv")
    model.graph.node[0].domain = "com.microsoft"
    _expect("the graph has no Conv node", "Conv", model)
    model.graph.node[0].domain = "ai.onnx"
    assert len(convert.read_conv(model)) == 1


def _with_constant():
    """A model whose W is the output of a Constant node."""
    model = _model("Conv")
    tensor = model.graph.initializer.pop(0)
    node = helper.make_node("Constant", [], ["W"], "constant", value=tensor)
    model.graph.node.insert(0, node)
    return model, model.graph.node[0]


def test_constant_nodes():
    model, node = _with_constant()
    assert len(convert.read_conv(model)) == 1
    del node.output[:]
    message = "the Constant node 'constant' must have one attribute and one output, got attributes"
    _expect(f"{message} ['value'] and outputs []", "Conv", model)
    model, node = _with_constant()
    del node.attribute[:]
    _expect(f"{message} [] and outputs ['W']", "Conv", model)
    model, node = _with_constant()
    node.attribute[0].CopyFrom(helper.make_attribute("value", 3))
    _expect("W of the node 'own' must be a tensor that onnx can read, got one of data_type 0", "Conv", model)
    model, node = _with_constant()
    node.domain = "com.example"
    _expect("W of the node 'own', 'W', must be a constant of the graph", "Conv", model)


def test_constants_of_floats():
    """A bias as `value_floats`, which Constant nodes have from version 12 of the operator on."""
    model = _model("Conv")
    model.graph.initializer.pop(1)
    values = [0.5, -1.0, 0.25, 2.0]
    model.graph.node.insert(0, helper.make_node("Constant", [], ["B"], "constant", value_floats=values))
    records = convert.read_conv(model)
    assert records[0].bias.dtype == np.float32
    np.testing.assert_array_equal(records[0].bias, values)
    message = "write_conv: B of the node 'own' must be a tensor of the model, got value_floats of a Constant node"
    with pytest.raises(ValueError, match=message):
        convert.write_conv(records, model)


def test_negative_dimensions():
    model = _model("Conv")
    model.graph.initializer[0].dims[0] = -1
    message = "W of the node 'own' must be a tensor that onnx can read, got one of data_type 1 and dims (-1, 3, 3, 2)"
    _expect(message, "Conv", model)


@pytest.mark.parametrize("data_type", [0, 99, TensorProto.STRING])
def test_tensors_of_unknown_types(data_type):
    model = _model("Conv")
    model.graph.initializer[0].data_type = data_type
    _expect(f"W of the node 'own' must be a tensor that onnx can read, got one of data_type {data_type}", "Conv", model)


def test_tensors_without_data():
    model = _model("Conv")
    model.graph.initializer[0].raw_data = b"1234"
    _expect("W of the node 'own' must be a tensor that onnx can read, got one of data_type 1", "Conv", model)
    tensor = model.graph.initializer[0]
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value="weights.bin")
    _expect("W of the node 'own' must be stored in the model, got external data", "Conv", model)
    model = _model("Conv")
    model.graph.initializer[0].CopyFrom(numpy_helper.from_array(np.ones((4, 3, 3, 2), np.int32), "W"))
    with pytest.raises(TypeError, match="W of the node 'own' must be a floating-point array, got ndarray of int32"):
        convert.read_conv(model)


def test_padding_of_valid():
    """`auto_pad` takes precedence over pads, in both directions."""
    for op_type, padding in (("Conv", "VALID"), ("ConvTranspose", ((0, 0), (0, 0)))):
        (record,) = READ[op_type][0](_model(op_type, {"auto_pad": "VALID", "pads": [1, 0, 2, 1]}))
        assert record.padding == padding
