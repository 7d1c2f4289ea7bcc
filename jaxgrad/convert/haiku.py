"""Reads and writes parameters of Haiku."""

from jaxgrad._src.convert.haiku_gru import read_gru as read_gru
from jaxgrad._src.convert.haiku_gru import write_gru as write_gru

__all__ = ["read_gru", "write_gru"]
