"""Layers of Haiku on the ops of jaxgrad."""

from jaxgrad._src.core.optional import require as _require

_require("haiku", extra="haiku", module="jaxgrad.nn.haiku")

from jaxgrad._src.nn.haiku_batch_norm import BatchNorm as BatchNorm  # noqa: E402
from jaxgrad._src.nn.haiku_gru import dynamic_unroll as dynamic_unroll  # noqa: E402
from jaxgrad._src.nn.haiku_norms import GroupNorm as GroupNorm  # noqa: E402
from jaxgrad._src.nn.haiku_norms import InstanceNorm as InstanceNorm  # noqa: E402
from jaxgrad._src.nn.haiku_norms import LayerNorm as LayerNorm  # noqa: E402
from jaxgrad._src.nn.haiku_norms import RMSNorm as RMSNorm  # noqa: E402

__all__ = ["BatchNorm", "GroupNorm", "InstanceNorm", "LayerNorm", "RMSNorm", "dynamic_unroll"]
