"""Nodes Conv and ConvTranspose of ONNX models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import onnx

from jaxgrad._src.convert.conv_weights import (
    ConvTransposeWeights,
    ConvWeights,
    Padding,
    check_arrays,
    features_first,
    features_last,
    window_extents,
)
from jaxgrad._src.convert.onnx_attributes import Attributes
from jaxgrad._src.convert.onnx_nodes import (
    ModelWriter,
    check_attributes,
    find_nodes,
    pair_nodes,
    read_constants,
)

_MODULE = "jaxgrad.convert.onnx"
_POSITIONS = {"W": 1, "B": 2}
_ATTRIBUTES = ("strides", "padding", "output_padding", "dilation", "groups")
_AUTO_PADS = {"NOTSET": None, "SAME_UPPER": "SAME", "SAME_LOWER": "SAME_LOWER", "VALID": "VALID"}


def read_conv(model: onnx.ModelProto, *names: str) -> tuple[ConvWeights, ...]:
    """Reads the Conv nodes of an ONNX model, with their attributes.

    Args:
      model: the model, as `onnx.load` returns it.
      *names: the names of the nodes; none for all Conv nodes of the graph, in its order.

    Returns:
      One `ConvWeights` for each node.

    Raises:
      TypeError: model is not an `onnx.ModelProto`, or the weights are not floating-point.
      ValueError: the model has no such node, its weights are not constants of the graph, their data are not loaded,
        or an attribute or a constant does not fit the operator.
    """
    function = f"{_MODULE}.read_conv"
    return tuple(_read_conv(function, model, node) for node in find_nodes(function, model, "Conv", names))


def _read_conv(function: str, model: onnx.ModelProto, node: onnx.NodeProto) -> ConvWeights:
    kernel, bias, attributes = _read(function, model, node)
    n = kernel.ndim - 2
    pairs = _pairs(attributes, n)
    padding: Padding = _AUTO_PADS[_auto_pad(attributes)] or pairs
    groups = attributes.integer("group", 1)
    check_arrays(attributes.label, kernel, bias, groups, transposed=False)
    return ConvWeights(
        kernel,
        bias,
        strides=attributes.integers("strides", 1, n, least=1),
        padding=padding,
        dilation=attributes.integers("dilations", 1, n, least=1),
        groups=groups,
        channels_last=False,
    )


def write_conv(weights: ConvWeights | Sequence[ConvWeights], model: onnx.ModelProto, *names: str) -> onnx.ModelProto:
    """Returns a copy of an ONNX model in which the Conv nodes have the weights of the records.

    Args:
      weights: one record for each node.
      model: the model, from which the records may have been read.
      *names: the names of the nodes; none for all Conv nodes of the graph, in its order.

    Returns:
      The new model. Only the constants with the weights change.

    Raises:
      TypeError: weights are not `ConvWeights`, or model is not an `onnx.ModelProto`.
      ValueError: the numbers of records and nodes differ, or a node has another shape, dtype or attribute than its
        record.
    """
    return _write(f"{_MODULE}.write_conv", weights, model, names, "Conv", ConvWeights, _read_conv)


def read_conv_transpose(model: onnx.ModelProto, *names: str) -> tuple[ConvTransposeWeights, ...]:
    """Reads the ConvTranspose nodes of an ONNX model, with their attributes. As `read_conv`.

    Raises:
      TypeError, ValueError: as `read_conv`; and the node has the attribute `output_shape`, whose padding depends on the
        size of x.
    """
    function = f"{_MODULE}.read_conv_transpose"
    nodes = find_nodes(function, model, "ConvTranspose", names)
    return tuple(_read_conv_transpose(function, model, node) for node in nodes)


def _read_conv_transpose(function: str, model: onnx.ModelProto, node: onnx.NodeProto) -> ConvTransposeWeights:
    kernel, bias, attributes = _read(function, model, node)
    n = kernel.ndim - 2
    attributes.check_absent("output_shape", "pads")
    groups = attributes.integer("group", 1)
    check_arrays(attributes.label, kernel, bias, groups, transposed=True)
    strides, dilation = (attributes.integers(name, 1, n, least=1) for name in ("strides", "dilations"))
    added = attributes.integers("output_padding", 0, n, least=0)
    auto_pad, padding = _auto_pad(attributes), _pairs(attributes, n)
    if auto_pad == "VALID":
        padding = ((0, 0),) * n
    elif auto_pad != "NOTSET":  # the result has size * stride positions
        extents = window_extents(kernel, dilation)
        totals = [extent + a - s for extent, a, s in zip(extents, added, strides, strict=True)]
        lows = [total // 2 if auto_pad == "SAME_UPPER" else total - total // 2 for total in totals]
        padding = tuple((low, total - low) for low, total in zip(lows, totals, strict=True))
    return ConvTransposeWeights(
        kernel,
        bias,
        strides=strides,
        padding=padding,
        output_padding=added,
        dilation=dilation,
        groups=groups,
        channels_last=False,
    )


def write_conv_transpose(
    weights: ConvTransposeWeights | Sequence[ConvTransposeWeights], model: onnx.ModelProto, *names: str
) -> onnx.ModelProto:
    """Returns a copy of an ONNX model in which the ConvTranspose nodes have the weights of the records.

    The arguments, the result and the errors are those of `write_conv`.
    """
    function = f"{_MODULE}.write_conv_transpose"
    return _write(function, weights, model, names, "ConvTranspose", ConvTransposeWeights, _read_conv_transpose)


def _read(
    function: str, model: onnx.ModelProto, node: onnx.NodeProto
) -> tuple[jax.Array, jax.Array | None, Attributes]:
    attributes = Attributes(function, node)
    arrays = read_constants(function, model, node, _POSITIONS, optional=("B",))
    window = arrays["W"].shape[2:]
    if arrays["W"].ndim not in (3, 4, 5):
        raise attributes.error("W", "of rank 3, 4 or 5", f"the shape {arrays['W'].shape}")
    attributes.check_same("kernel_shape", window, "the window of W")
    return features_last(arrays["W"]), arrays.get("B"), attributes


def _auto_pad(attributes: Attributes) -> str:
    return attributes.text("auto_pad", "NOTSET", tuple(_AUTO_PADS))


def _pairs(attributes: Attributes, n: int) -> tuple[tuple[int, int], ...]:
    pads = attributes.integers("pads", 0, 2 * n, least=0)
    return tuple(zip(pads[:n], pads[n:], strict=True))


def _write(
    function: str, weights: Any, model: Any, names: Sequence[str], op_type: str, record: type, read: Any
) -> onnx.ModelProto:
    writer = ModelWriter(function, model)
    for own, node in pair_nodes(writer, weights, record, op_type, names):
        check_attributes(function, node, own, read(function, model, node), _ATTRIBUTES)
        writer.write(node, _POSITIONS, {"W": features_first(own.kernel), "B": own.bias})
    return writer.model
