"""Reads and writes layers of Keras 3."""

from jaxgrad._src.convert.keras_gru import read_gru as read_gru
from jaxgrad._src.convert.keras_gru import write_gru as write_gru

__all__ = ["read_gru", "write_gru"]
