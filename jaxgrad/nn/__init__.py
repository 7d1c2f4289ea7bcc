"""Layers. This module has those that need no framework; those for a framework are in a module of its name, such as
`jaxgrad.nn.linen`, which is imported where it is first used."""

from jaxgrad._src.core.optional import lazy_submodules as _lazy_submodules
from jaxgrad._src.nn.gru import GRU as GRU
from jaxgrad._src.nn.torch_norms import GroupNorm as GroupNorm
from jaxgrad._src.nn.torch_norms import InstanceNorm as InstanceNorm
from jaxgrad._src.nn.torch_norms import LayerNorm as LayerNorm
from jaxgrad._src.nn.torch_norms import RMSNorm as RMSNorm

__all__ = ["GRU", "GroupNorm", "InstanceNorm", "LayerNorm", "RMSNorm"]
__getattr__, __dir__ = _lazy_submodules(__name__, __all__, ("equinox", "haiku", "keras", "linen", "nnx"))
