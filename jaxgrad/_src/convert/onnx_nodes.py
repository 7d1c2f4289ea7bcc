"""Nodes of ONNX models, their attributes, and the constants that they read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
import onnx
from onnx import numpy_helper

from jaxgrad._src.convert.arrays import as_jax
from jaxgrad._src.convert.records import as_records

# What a node reads: a tensor, or the attribute `value_floats` of a Constant node.
_Constant = onnx.TensorProto | onnx.AttributeProto


def check_model(function: str, model: Any) -> None:
    if not isinstance(model, onnx.ModelProto):
        raise TypeError(
            f"{function}: model must be an onnx.ModelProto, got {type(model).__name__}; of a file, onnx.load"
        )


def find_nodes(function: str, model: Any, op_type: str | tuple[str, ...], names: Sequence[str]) -> list[onnx.NodeProto]:
    """The nodes of a type, or of several, with these names; without names all of them, in the order of the graph."""
    check_model(function, model)
    types = (op_type,) if isinstance(op_type, str) else op_type
    nodes = [node for node in model.graph.node if _is_operator(node, types)]
    text = " or ".join(types)
    found = {node.name: node for node in nodes}
    for name in names:
        if name not in found:
            raise ValueError(f"{function}: the graph has no {text} node {name!r}; it has {list(found)}")
    if not nodes:
        raise ValueError(f"{function}: the graph has no {text} node")
    return [found[name] for name in names] if names else nodes


def _is_operator(node: onnx.NodeProto, types: tuple[str, ...]) -> bool:
    """Whether a node is an operator of ONNX itself, and not one of the same name in another domain."""
    return node.op_type in types and node.domain in ("", "ai.onnx")


def read_constants(
    function: str,
    model: onnx.ModelProto,
    node: onnx.NodeProto,
    positions: Mapping[str, int],
    optional: Sequence[str] = (),
) -> dict[str, jax.Array]:
    """The constant inputs of a node that are given, by the names of `positions`."""
    constants = _constants(function, model, node, positions)
    for name, position in positions.items():
        if name not in constants and name not in optional:
            raise ValueError(
                f"{function}: the node {node.name!r} must have {name}, its input {position}, got {list(node.input)}"
            )
    return {
        name: _read_constant(function, f"{name} of the node {node.name!r}", constant)
        for name, (_, constant) in constants.items()
    }


def _read_constant(function: str, label: str, constant: _Constant) -> jax.Array:
    if isinstance(constant, onnx.AttributeProto):
        return as_jax(function, label, np.asarray(constant.floats, np.float32))
    return as_jax(function, label, _read_tensor(function, label, constant))


def _read_tensor(function: str, label: str, tensor: onnx.TensorProto) -> np.ndarray:
    if tensor.data_location == onnx.TensorProto.EXTERNAL:
        raise ValueError(
            f"{function}: {label} must be stored in the model, got external data, which onnx.load reads from the file"
        )
    try:
        if min(tensor.dims, default=0) < 0:  # NumPy infers a dimension of -1
            raise ValueError(tensor.dims)
        return numpy_helper.to_array(tensor)
    except Exception as error:  # for a malformed tensor, onnx raises errors of several types
        found = f"data_type {tensor.data_type} and dims {tuple(tensor.dims)}"
        raise ValueError(f"{function}: {label} must be a tensor that onnx can read, got one of {found}") from error


def _constants(
    function: str, model: onnx.ModelProto, node: onnx.NodeProto, positions: Mapping[str, int]
) -> dict[str, tuple[str, _Constant]]:
    """The constants by the names of `positions`, each with the name of its value in the graph."""
    constants: dict[str, _Constant] = {tensor.name: tensor for tensor in model.graph.initializer}
    for other in model.graph.node:
        if not _is_operator(other, ("Constant",)):
            continue
        if len(other.attribute) != 1 or len(other.output) != 1:
            own = f"attributes {[a.name for a in other.attribute]} and outputs {list(other.output)}"
            raise ValueError(
                f"{function}: the Constant node {other.name!r} must have one attribute and one output, got {own}"
            )
        (attribute,) = other.attribute
        if attribute.name in ("value", "value_floats"):
            constants[other.output[0]] = attribute.t if attribute.name == "value" else attribute
    found = {}
    for name, position in positions.items():
        value = node.input[position] if position < len(node.input) else ""
        if not value:
            continue
        if value not in constants:
            raise ValueError(
                f"{function}: {name} of the node {node.name!r}, {value!r}, must be a constant of the graph"
            )
        found[name] = value, constants[value]
    return found


def rank_of(model: onnx.ModelProto, name: str) -> int | None:
    """The rank of an array of a graph; None if the model does not say it."""
    graph = model.graph
    for value in (*graph.input, *graph.value_info, *graph.output):
        if value.name == name and value.type.tensor_type.HasField("shape"):
            return len(value.type.tensor_type.shape.dim)
    return None


def check_attributes(function: str, node: onnx.NodeProto, own: Any, other: Any, names: Sequence[str]) -> None:
    """Checks that a record has the attributes of `other`, the record of the node. ONNX's floats are float32."""
    for name in names:
        found, expected = getattr(own, name, None), getattr(other, name, None)
        if isinstance(found, float) and isinstance(expected, float) and np.float32(found) == np.float32(expected):
            continue
        if found != expected:
            raise ValueError(
                f"{function}: the weights for the node {node.name!r} must have {name}={expected!r}, got {found!r}"
            )


class ModelWriter:
    """Replaces constants in a copy of a model."""

    def __init__(self, function: str, model: onnx.ModelProto) -> None:
        check_model(function, model)
        self.function = function
        self.model = onnx.ModelProto()
        self.model.CopyFrom(model)
        self._written: dict[str, bytes] = {}  # the data of each constant, by its name in the graph

    def write(self, node: onnx.NodeProto, positions: Mapping[str, int], arrays: Mapping[str, jax.Array | None]) -> None:
        """Replaces the constants that a node of the copy reads."""
        constants = _constants(self.function, self.model, node, positions)
        for name, array in arrays.items():
            if (array is None) != (name not in constants):
                texts = (f"with {name}", f"without {name}")
                expected, found = texts if array is None else texts[::-1]
                raise ValueError(
                    f"{self.function}: the weights for the node {node.name!r} must be {expected}, got weights {found}"
                )
            if array is not None:
                self._replace(f"{name} of the node {node.name!r}", np.asarray(array), *constants[name])

    def _replace(self, label: str, array: np.ndarray, value: str, tensor: _Constant) -> None:
        if isinstance(tensor, onnx.AttributeProto):
            raise ValueError(
                f"{self.function}: {label} must be a tensor of the model, got value_floats of a Constant node; "
                "store the values as an initializer"
            )
        new = numpy_helper.from_array(array, tensor.name)
        if (new.data_type, new.dims) != (tensor.data_type, tensor.dims):
            old = f"{onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type)} {tuple(tensor.dims)}"
            raise ValueError(f"{self.function}: {label} must be {old}, got {array.dtype} {array.shape}")
        tensor.CopyFrom(new)
        if self._written.setdefault(value, new.raw_data) != new.raw_data:
            raise ValueError(
                f"{self.function}: {label} is the constant {value!r} of another node, which has other weights"
            )


def pair_nodes(
    writer: ModelWriter, weights: Any, record: type, op_type: str | tuple[str, ...], names: Sequence[str]
) -> list[tuple[Any, onnx.NodeProto]]:
    """The records, each with its node in the copy."""
    records = as_records(writer.function, weights, record)
    nodes = find_nodes(writer.function, writer.model, op_type, names)
    if len(nodes) != len(records):
        raise ValueError(
            f"{writer.function}: weights must have a record for each of the {len(nodes)} nodes, got {len(records)}"
        )
    return list(zip(records, nodes, strict=True))
