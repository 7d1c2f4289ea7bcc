"""Reads and writes layers of Keras 3."""

from jaxgrad._src.convert.keras_batch_norm import read_batch_norm as read_batch_norm
from jaxgrad._src.convert.keras_batch_norm import write_batch_norm as write_batch_norm
from jaxgrad._src.convert.keras_conv import read_conv as read_conv
from jaxgrad._src.convert.keras_conv import read_conv_transpose as read_conv_transpose
from jaxgrad._src.convert.keras_conv import write_conv as write_conv
from jaxgrad._src.convert.keras_conv import write_conv_transpose as write_conv_transpose
from jaxgrad._src.convert.keras_gru import read_gru as read_gru
from jaxgrad._src.convert.keras_gru import write_gru as write_gru
from jaxgrad._src.convert.keras_norm import read_norm as read_norm
from jaxgrad._src.convert.keras_norm import write_norm as write_norm

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
