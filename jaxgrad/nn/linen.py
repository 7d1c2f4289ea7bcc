"""Layers of flax.linen on the ops of jaxgrad."""

from jaxgrad._src.core.optional import require as _require

_require("flax", extra="flax", module="jaxgrad.nn.linen")

from jaxgrad._src.nn.linen_batch_norm import BatchNorm as BatchNorm  # noqa: E402
from jaxgrad._src.nn.linen_norms import GroupNorm as GroupNorm  # noqa: E402
from jaxgrad._src.nn.linen_norms import InstanceNorm as InstanceNorm  # noqa: E402
from jaxgrad._src.nn.linen_norms import LayerNorm as LayerNorm  # noqa: E402
from jaxgrad._src.nn.linen_norms import RMSNorm as RMSNorm  # noqa: E402
from jaxgrad._src.nn.linen_rnn import RNN as RNN  # noqa: E402

__all__ = ["RNN", "BatchNorm", "GroupNorm", "InstanceNorm", "LayerNorm", "RMSNorm"]
