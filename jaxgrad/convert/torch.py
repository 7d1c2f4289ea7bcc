"""Reads and writes state dicts of PyTorch."""

from jaxgrad._src.convert.torch_gru import read_gru as read_gru
from jaxgrad._src.convert.torch_gru import write_gru as write_gru

__all__ = ["read_gru", "write_gru"]
