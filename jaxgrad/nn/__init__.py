"""Layers. This module has those that need no framework; those for a framework are in a module of its name, such as
`jaxgrad.nn.linen`, which is imported by itself."""

from jaxgrad._src.nn.gru import GRU as GRU

__all__ = ["GRU"]
