"""GRU nodes of ONNX models. The convention is that of `jaxgrad.gru`."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import onnx

from jaxgrad._src.convert.gru_weights import GRUWeights
from jaxgrad._src.convert.onnx_attributes import Attributes
from jaxgrad._src.convert.onnx_nodes import (
    ModelWriter,
    check_attributes,
    find_nodes,
    pair_nodes,
    read_constants,
)

_READ, _WRITE = "jaxgrad.convert.onnx.read_gru", "jaxgrad.convert.onnx.write_gru"
_POSITIONS = {"W": 1, "R": 2, "B": 3}


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
      TypeError: model is not an `onnx.ModelProto`, or the weights are not floating-point.
      ValueError: the model has no such node, its weights are not constants of the graph, their data are not loaded,
        an attribute or a constant does not fit the operator, or the node has other activations than the default ones.
    """
    return tuple(_read_node(_READ, model, node) for node in find_nodes(_READ, model, "GRU", names))


def _read_node(function: str, model: onnx.ModelProto, node: onnx.NodeProto) -> GRUWeights:
    attributes = Attributes(function, node)
    activations = [name.lower() for name in attributes.texts("activations")]
    if activations not in ([], ["sigmoid", "tanh"], 2 * ["sigmoid", "tanh"]):
        raise ValueError(
            f"{function}: the node {node.name!r} must have the activations Sigmoid and Tanh, "
            f"got {', '.join(activations)}"
        )
    arrays = read_constants(function, model, node, _POSITIONS, optional=("B",))
    direction = attributes.text("direction", "forward", ("forward", "reverse", "bidirectional"))
    _check_shapes(attributes, direction, **arrays)
    rows = arrays["R"].shape[1]
    b = arrays.get("B")
    clip = attributes.number("clip", None)
    if clip is not None and not clip > 0:
        raise attributes.error("clip", "above 0", clip)
    attributes.integer("layout", 0, choices=(0, 1))
    return GRUWeights(
        arrays["W"],
        arrays["R"],
        None if b is None else b[:, :rows],
        None if b is None else b[:, rows:],
        linear_before_reset=bool(attributes.integer("linear_before_reset", 0, choices=(0, 1))),
        reverse=direction == "reverse",
        clip=clip,
    )


def _check_shapes(
    attributes: Attributes, direction: str, W: jax.Array, R: jax.Array, B: jax.Array | None = None
) -> None:
    D, H = 1 + (direction == "bidirectional"), R.shape[-1] if R.ndim else 0
    I = W.shape[-1] if W.ndim else 0  # noqa: E741
    expected = {"R": (D, 3 * H, H), "W": (D, 3 * H, I), "B": (D, 6 * H)}
    dims = {"R": "[D, 3H, H]", "W": "[D, 3H, I]", "B": "[D, 6H]"}
    for name, array in (("R", R), ("W", W), ("B", B)):
        if array is not None and array.shape != expected[name]:
            text = f"of the shape {dims[name]}, with D = {D} for the direction {direction!r} and H = {H} of R"
            raise attributes.error(name, text, array.shape)
    attributes.check_same("hidden_size", H, "H of R")


def write_gru(weights: GRUWeights | Sequence[GRUWeights], model: onnx.ModelProto, *names: str) -> onnx.ModelProto:
    """Returns a copy of an ONNX model in which the GRU nodes have the weights of the records.

    Args:
      weights: one record for each node.
      model: the model, from which the records may have been read.
      *names: the names of the nodes; none for all GRU nodes of the graph, in its order.

    Returns:
      The new model. Only the constants with the weights change.

    Raises:
      TypeError: weights are not `GRUWeights`, or model is not an `onnx.ModelProto`.
      ValueError: the numbers of records and nodes differ, or a node computes something else than its record: another
        direction, `linear_before_reset`, `clip`, shape or dtype, no bias, or two nodes share a constant and would need
        different values.
    """
    writer = ModelWriter(_WRITE, model)
    for layer, node in pair_nodes(writer, weights, GRUWeights, "GRU", names):
        expected = _read_node(_WRITE, model, node)
        check_attributes(_WRITE, node, layer, expected, ("direction", "linear_before_reset", "clip"))
        b = layer.b
        if b is None and expected.b is not None:
            b = jnp.zeros((layer.r.shape[0], 2 * layer.r.shape[1]), layer.r.dtype)
        writer.write(node, _POSITIONS, {"W": layer.w, "R": layer.r, "B": b})
    return writer.model
