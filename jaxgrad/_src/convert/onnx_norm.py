"""Nodes GroupNormalization, LayerNormalization, InstanceNormalization and RMSNormalization of ONNX models."""

from __future__ import annotations

from collections.abc import Sequence

import onnx

from jaxgrad._src.convert.norm_weights import KINDS, NormWeights, norm_weights
from jaxgrad._src.convert.onnx_attributes import Attributes
from jaxgrad._src.convert.onnx_nodes import (
    ModelWriter,
    check_attributes,
    find_nodes,
    pair_nodes,
    rank_of,
    read_constants,
)

_READ, _WRITE = "jaxgrad.convert.onnx.read_norm", "jaxgrad.convert.onnx.write_norm"
_TYPES = tuple(name for name in KINDS if name.endswith("Normalization"))
_POSITIONS = {"scale": 1, "bias": 2}


def read_norm(model: onnx.ModelProto, *names: str) -> tuple[NormWeights, ...]:
    """Reads the group, layer, instance and RMS normalizations of an ONNX model, with their attributes.

    Args:
      model: the model, as `onnx.load` returns it.
      *names: the names of the nodes; none for all GroupNormalization, LayerNormalization, InstanceNormalization and
        RMSNormalization nodes of the graph, in its order. Before opset 21, a group normalization has a scale and a bias
        for each group, and so has its record. The scale of a layer or RMS normalization must have all normalized axes;
        this is checked where `axis` is negative or the model says the rank of x.

    Returns:
      One `NormWeights` for each node.

    Raises:
      TypeError: model is not an `onnx.ModelProto`, or the inputs are not floating-point.
      ValueError: the model has no such node, its inputs are not constants of the graph, their data are not loaded,
        or an attribute or a constant does not fit the operator.
    """
    return tuple(_read_node(_READ, model, node) for node in find_nodes(_READ, model, _TYPES, names))


def _read_node(function: str, model: onnx.ModelProto, node: onnx.NodeProto) -> NormWeights:
    kind, attributes = KINDS[node.op_type], Attributes(function, node)
    optional = ("bias",) if kind in ("layer", "rms") else ()
    arrays = read_constants(function, model, node, _POSITIONS, optional)
    scale, bias = (arrays.get(name) for name in _POSITIONS)
    assert scale is not None
    axis: int | None = 1
    if kind in ("layer", "rms"):
        axis = None
        own, rank = attributes.integer("axis", -1), rank_of(model, node.input[0])
        from_the_end = own if own < 0 else None if rank is None else own - rank
        if from_the_end not in (None, -scale.ndim):  # the record has as many axes as the scale
            raise attributes.error("axis", f"{-scale.ndim}, as scale has the shape {scale.shape}", own)
    return norm_weights(
        attributes.label,
        kind,
        scale,
        bias,
        epsilon=attributes.number("epsilon", 1e-5),
        epsilon_name="epsilon",
        num_groups=attributes.integer("num_groups", 0) if kind == "group" else None,
        axis=axis,
    )


def write_norm(weights: NormWeights | Sequence[NormWeights], model: onnx.ModelProto, *names: str) -> onnx.ModelProto:
    """Returns a copy of an ONNX model in which the nodes that `read_norm` reads have the arrays of the records.

    The arguments, the result and the errors are those of `write_batch_norm`. The kind and the number of groups of a
    record must be those of its node, too.
    """
    writer = ModelWriter(_WRITE, model)
    for own, node in pair_nodes(writer, weights, NormWeights, _TYPES, names):
        check_attributes(_WRITE, node, own, _read_node(_WRITE, model, node), ("kind", "epsilon", "num_groups"))
        writer.write(node, _POSITIONS, {"scale": own.scale, "bias": own.bias})
    return writer.model
