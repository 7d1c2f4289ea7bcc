"""Weights of other libraries in and out. Each format is a module, such as `jaxgrad.convert.torch`, which is
imported where it is first used; all read into the records that this module has, and write from them."""

from jaxgrad._src.convert.batch_norm_weights import BatchNormWeights as BatchNormWeights
from jaxgrad._src.convert.conv_weights import ConvTransposeWeights as ConvTransposeWeights
from jaxgrad._src.convert.conv_weights import ConvWeights as ConvWeights
from jaxgrad._src.convert.gru_weights import GRUWeights as GRUWeights
from jaxgrad._src.convert.norm_weights import NormWeights as NormWeights
from jaxgrad._src.core.optional import lazy_submodules as _lazy_submodules

__all__ = ["BatchNormWeights", "ConvTransposeWeights", "ConvWeights", "GRUWeights", "NormWeights"]
__getattr__, __dir__ = _lazy_submodules(__name__, __all__, ("equinox", "flax", "haiku", "keras", "onnx", "torch"))
