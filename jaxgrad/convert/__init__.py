"""Weights of other libraries in and out. Each format is a module that is imported by itself, such as
`jaxgrad.convert.torch`; all read into the records that this module has, and write from them."""

from jaxgrad._src.convert.batch_norm_weights import BatchNormWeights as BatchNormWeights
from jaxgrad._src.convert.conv_weights import ConvTransposeWeights as ConvTransposeWeights
from jaxgrad._src.convert.conv_weights import ConvWeights as ConvWeights
from jaxgrad._src.convert.gru_weights import GRUWeights as GRUWeights

__all__ = ["BatchNormWeights", "ConvTransposeWeights", "ConvWeights", "GRUWeights"]
