"""Reads and writes ONNX models."""

from jaxgrad._src.core.optional import require as _require

_require("onnx", extra="onnx", module="jaxgrad.convert.onnx")

from jaxgrad._src.convert.onnx_batch_norm import read_batch_norm as read_batch_norm  # noqa: E402
from jaxgrad._src.convert.onnx_batch_norm import write_batch_norm as write_batch_norm  # noqa: E402
from jaxgrad._src.convert.onnx_conv import read_conv as read_conv  # noqa: E402
from jaxgrad._src.convert.onnx_conv import read_conv_transpose as read_conv_transpose  # noqa: E402
from jaxgrad._src.convert.onnx_conv import write_conv as write_conv  # noqa: E402
from jaxgrad._src.convert.onnx_conv import write_conv_transpose as write_conv_transpose  # noqa: E402
from jaxgrad._src.convert.onnx_gru import read_gru as read_gru  # noqa: E402
from jaxgrad._src.convert.onnx_gru import write_gru as write_gru  # noqa: E402
from jaxgrad._src.convert.onnx_norm import read_norm as read_norm  # noqa: E402
from jaxgrad._src.convert.onnx_norm import write_norm as write_norm  # noqa: E402

__all__ = [
    "read_batch_norm",
    "read_conv",
    "read_conv_transpose",
    "read_gru",
    "read_norm",
    "write_batch_norm",
    "write_conv",
    "write_conv_transpose",
    "write_gru",
    "write_norm",
]
