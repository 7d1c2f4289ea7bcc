"""Reads and writes parameters of flax, linen and nnx."""

from jaxgrad._src.convert.flax_gru import read_gru as read_gru
from jaxgrad._src.convert.flax_gru import write_gru as write_gru

__all__ = ["read_gru", "write_gru"]
