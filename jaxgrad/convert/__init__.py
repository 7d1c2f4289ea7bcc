"""Weights of other libraries in and out. Each format is a module that is imported by itself, such as
`jaxgrad.convert.torch`; all read into the records that this module has, and write from them."""

from jaxgrad._src.convert.gru_weights import GRUWeights as GRUWeights

__all__ = ["GRUWeights"]
