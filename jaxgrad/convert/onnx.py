"""Reads and writes ONNX models."""

from jaxgrad._src.core.optional import require as _require

_require("onnx", extra="onnx", module="jaxgrad.convert.onnx")

from jaxgrad._src.convert.onnx_gru import read_gru as read_gru  # noqa: E402
from jaxgrad._src.convert.onnx_gru import write_gru as write_gru  # noqa: E402

__all__ = ["read_gru", "write_gru"]
