"""GRU nodes of ONNX models. The convention is that of `jaxgrad.gru`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
import onnx
from onnx import numpy_helper

from jaxgrad._src.convert.arrays import as_jax
from jaxgrad._src.convert.gru_weights import GRUWeights, as_layers

_READ, _WRITE = "jaxgrad.convert.onnx.read_gru", "jaxgrad.convert.onnx.write_gru"
_ARRAYS = {1: "W", 2: "R", 3: "B"}


def read_gru(model: onnx.ModelProto, *names: str) -> tuple[GRUWeights, ...]:
    """Reads the GRU nodes of an ONNX model.

    The attributes `direction`, `linear_before_reset` and `clip` are part of the result. `layout`, the initial state and
    the lengths are arguments of its call.

    Args:
      model: the model, as `onnx.load` returns it.
      *names: the names of the nodes; none for all GRU nodes of the graph, in its order.

    Returns:
      One `GRUWeights` for each node.

    Raises:
      TypeError: model is not an `onnx.ModelProto`.
      ValueError: the model has no such node, its weights are not constants of the graph, or it has other activations
        than the default ones.
    """
    return tuple(_read_node(model, node) for node in _nodes(_READ, model, names))


def _nodes(function: str, model: Any, names: Sequence[str]) -> list[onnx.NodeProto]:
    if not isinstance(model, onnx.ModelProto):
        raise TypeError(
            f"{function}: model must be an onnx.ModelProto, got {type(model).__name__}; of a file, onnx.load"
        )
    nodes = [node for node in model.graph.node if node.op_type == "GRU"]
    found = {node.name: node for node in nodes}
    for name in names:
        if name not in found:
            raise ValueError(f"{function}: the graph has no GRU node {name!r}; its GRU nodes are {list(found)}")
    if not nodes:
        raise ValueError(f"{function}: the graph has no GRU node")
    return [found[name] for name in names] if names else nodes


def _tensors(model: onnx.ModelProto) -> dict[str, onnx.TensorProto]:
    """The constants of the graph, by name: initializers and the values of Constant nodes."""
    tensors = {tensor.name: tensor for tensor in model.graph.initializer}
    for node in model.graph.node:
        if node.op_type == "Constant" and node.attribute[0].name == "value":
            tensors[node.output[0]] = node.attribute[0].t
    return tensors


def _attributes(node: onnx.NodeProto) -> dict[str, Any]:
    return {attribute.name: onnx.helper.get_attribute_value(attribute) for attribute in node.attribute}


def _weights_of(function: str, model: onnx.ModelProto, node: onnx.NodeProto) -> dict[str, tuple[str, onnx.TensorProto]]:
    """The tensors W, R and perhaps B of a node, each with the name of its value in the graph."""
    tensors, found = _tensors(model), {}
    for position, array in _ARRAYS.items():
        name = node.input[position] if position < len(node.input) else ""
        if not name:
            continue
        if name not in tensors:
            raise ValueError(
                f"{function}: {array} of the node {node.name!r}, {name!r}, must be a constant of the graph"
            )
        found[array] = name, tensors[name]
    return found


def _read_node(model: onnx.ModelProto, node: onnx.NodeProto) -> GRUWeights:
    attributes = _attributes(node)
    activations = [name.decode().lower() for name in attributes.get("activations", ())]
    if activations not in ([], ["sigmoid", "tanh"], 2 * ["sigmoid", "tanh"]):
        raise ValueError(
            f"{_READ}: the node {node.name!r} must have the activations Sigmoid and Tanh, got {', '.join(activations)}"
        )
    arrays = {
        name: as_jax(_READ, f"{name} of {node.name!r}", numpy_helper.to_array(tensor))
        for name, (_, tensor) in _weights_of(_READ, model, node).items()
    }
    rows = arrays["R"].shape[1]
    b = arrays.get("B")
    return GRUWeights(
        arrays["W"],
        arrays["R"],
        None if b is None else b[:, :rows],
        None if b is None else b[:, rows:],
        linear_before_reset=bool(attributes.get("linear_before_reset", 0)),
        reverse=attributes.get("direction", b"forward") == b"reverse",
        clip=attributes.get("clip"),
    )


def write_gru(weights: GRUWeights | Sequence[GRUWeights], model: onnx.ModelProto, *names: str) -> onnx.ModelProto:
    """Returns a copy of an ONNX model in which the GRU nodes have the weights of the records.

    Args:
      weights: one record for each node.
      model: the model, from which the records may have been read.
      *names: the names of the nodes; none for all GRU nodes of the graph, in its order.

    Returns:
      The new model. Only the constants with the weights change.

    Raises:
      TypeError: weights are no `GRUWeights`, or model is not an `onnx.ModelProto`.
      ValueError: the numbers of records and nodes differ, or a node computes something else than its record: another
        direction, `linear_before_reset`, `clip`, shape or dtype, no bias, or two nodes share a constant and would need
        different values.
    """
    layers = as_layers(_WRITE, weights)
    written = onnx.ModelProto()
    written.CopyFrom(model)
    nodes = _nodes(_WRITE, written, names)
    if len(nodes) != len(layers):
        raise ValueError(f"{_WRITE}: weights must have a record for each of the {len(nodes)} nodes, got {len(layers)}")
    replaced: dict[str, bytes] = {}
    for layer, node in zip(layers, nodes, strict=True):
        _write_node(layer, written, node, replaced)
    return written


def _write_node(layer: GRUWeights, model: onnx.ModelProto, node: onnx.NodeProto, replaced: dict[str, bytes]) -> None:
    """`replaced` has the data of each constant that was written, by its name in the graph."""
    tensors, attributes = _weights_of(_WRITE, model, node), _attributes(node)
    expected = {
        "direction": attributes.get("direction", b"forward").decode(),
        "linear_before_reset": bool(attributes.get("linear_before_reset", 0)),
        "clip": attributes.get("clip"),
    }
    for name, value in expected.items():
        if getattr(layer, name) != value:
            raise ValueError(
                f"{_WRITE}: the weights for the node {node.name!r} must have {name}={value!r}, got "
                f"{getattr(layer, name)!r}"
            )
    b = layer.b
    if b is not None and "B" not in tensors:
        raise ValueError(f"{_WRITE}: the node {node.name!r} has no bias B, but the weights have biases")
    if b is None:
        b = jnp.zeros((layer.r.shape[0], 2 * layer.r.shape[1]), layer.r.dtype)
    for name, array in (("W", layer.w), ("R", layer.r), ("B", b)):
        if name in tensors:
            constant, tensor = tensors[name]
            data = _write_tensor(f"{name} of the node {node.name!r}", np.asarray(array), tensor)
            if replaced.setdefault(constant, data) != data:
                raise ValueError(
                    f"{_WRITE}: {name} of the node {node.name!r} is the constant {constant!r} of another node, which "
                    "has other weights"
                )


def _write_tensor(name: str, array: np.ndarray, tensor: onnx.TensorProto) -> bytes:
    """Returns the data that was written."""
    new = numpy_helper.from_array(array, tensor.name)
    if (new.data_type, new.dims) != (tensor.data_type, tensor.dims):
        old = f"{onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type)} {tuple(tensor.dims)}"
        raise ValueError(f"{_WRITE}: {name} must be {old}, got {array.dtype} {array.shape}")
    tensor.CopyFrom(new)
    return bytes(new.raw_data)
