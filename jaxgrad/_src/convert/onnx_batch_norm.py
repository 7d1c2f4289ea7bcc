"""Nodes BatchNormalization of ONNX models."""

from __future__ import annotations

from collections.abc import Sequence

import onnx

from jaxgrad._src.convert.batch_norm_weights import (
    BatchNormWeights,
    as_epsilon,
    as_momentum,
    check_vectors,
)
from jaxgrad._src.convert.onnx_attributes import Attributes
from jaxgrad._src.convert.onnx_nodes import (
    ModelWriter,
    check_attributes,
    find_nodes,
    pair_nodes,
    read_constants,
)

_READ, _WRITE = "jaxgrad.convert.onnx.read_batch_norm", "jaxgrad.convert.onnx.write_batch_norm"
_POSITIONS = {"scale": 1, "B": 2, "input_mean": 3, "input_var": 4}


def read_batch_norm(model: onnx.ModelProto, *names: str) -> tuple[BatchNormWeights, ...]:
    """Reads the BatchNormalization nodes of an ONNX model, with their attributes.

    Args:
      model: the model, as `onnx.load` returns it.
      *names: the names of the nodes; none for all BatchNormalization nodes of the graph, in its order.

    Returns:
      One `BatchNormWeights` for each node.

    Raises:
      TypeError: model is not an `onnx.ModelProto`, or the inputs are not floating-point.
      ValueError: the model has no such node, its inputs are not constants of the graph, their data are not loaded,
        or an attribute or a constant does not fit the operator.
    """
    nodes = find_nodes(_READ, model, "BatchNormalization", names)
    return tuple(_read_node(_READ, model, node) for node in nodes)


def _read_node(function: str, model: onnx.ModelProto, node: onnx.NodeProto) -> BatchNormWeights:
    arrays, attributes = read_constants(function, model, node, _POSITIONS), Attributes(function, node)
    check_vectors(attributes.label, **arrays)
    scale, bias, mean, var = (arrays[name] for name in _POSITIONS)
    return BatchNormWeights(
        scale,
        bias,
        mean,
        var,
        epsilon=as_epsilon(attributes.label, "epsilon", attributes.number("epsilon", 1e-5)),
        momentum=as_momentum(attributes.label, "momentum", attributes.number("momentum", 0.9)),
        feature_axis=1,
    )


def write_batch_norm(
    weights: BatchNormWeights | Sequence[BatchNormWeights], model: onnx.ModelProto, *names: str
) -> onnx.ModelProto:
    """Returns a copy of an ONNX model in which the BatchNormalization nodes have the arrays of the records.

    Args:
      weights: one record for each node.
      model: the model, from which the records may have been read.
      *names: the names of the nodes; none for all BatchNormalization nodes of the graph, in its order.

    Returns:
      The new model. Only the constants with the weights change.

    Raises:
      TypeError: weights are not `BatchNormWeights`, or model is not an `onnx.ModelProto`.
      ValueError: the numbers of records and nodes differ, or a node has another shape, dtype or epsilon than its
        record.
    """
    writer = ModelWriter(_WRITE, model)
    for own, node in pair_nodes(writer, weights, BatchNormWeights, "BatchNormalization", names):
        check_attributes(_WRITE, node, own, _read_node(_WRITE, model, node), ("epsilon",))
        writer.write(node, _POSITIONS, dict(zip(_POSITIONS, (own.scale, own.bias, own.mean, own.var), strict=True)))
    return writer.model
